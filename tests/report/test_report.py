"""tools/report.py on run folders, whole and damaged, and in a browser where there is one."""

from __future__ import annotations

import json
import math
import subprocess
import threading
import urllib.error
import urllib.request
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from pangu.checkpoint.run_folder import save_config
from pangu.metrics.record import to_json
from pangu.report.charts import Line, thin, ticks
from pangu.report.page import COLOURS, compare, render
from pangu.report.runs import _NUMBERS, open_run
from tests.configs import config
from tests.end_to_end.commands import SMALL, called, metrics
from tests.metrics.conftest import RECORD
from tests.report.narrow import CHROMIUM, check_in_browser, check_style
from tests.spawn import repository
from tools.report import REFRESH_SECONDS, make_server

RECIPE = config("+config=quickstart", "train.steps=40")


class Page(HTMLParser):
    """Elements, and texts of the cells of all tables."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[list[str]] = []
        self._in_cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._in_cell = self._in_cell or tag in ("td", "th")
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")

    def handle_endtag(self, tag: str) -> None:
        self._in_cell = self._in_cell and tag not in ("td", "th")

    def handle_data(self, data: str) -> None:
        if self._in_cell:
            self.rows[-1][-1] += data

    def row(self, first: str) -> list[str]:
        """The cells behind the first one with this text."""
        return next(row[1:] for row in self.rows if row[0] == first)


def make_run(folder: Path, lr: float, steps: int = 40, doing: str = "ended", **summary: object) -> Path:
    """A run folder as a run leaves it, without training."""
    folder.mkdir(parents=True)
    save_config(folder, replace(RECIPE, optimizer=replace(RECIPE.optimizer, lr=lr)))
    records = [
        replace(
            RECORD,
            step=step,
            tokens=1000 * step,
            loss=5 / step**0.2 + 100 * lr,
            lr=lr,
            validation_loss=4.0 + lr if step % 20 == 0 else None,
            skipped=int(step > 25) if lr > 0.01 else 0,
            continued_from=30 if step == 31 and lr > 0.01 else None,
            slow_ranks={3: 1.72} if step == 10 and lr > 0.01 else None,
            experts={"load": 1.5, "least_load": 0.5, "dropped": 0.0},
            evaluation={"lambada/accuracy": 0.25} if step == 40 else None,
            validation_sources={"web": {"loss": 4.0, "perplexity": 54.6}, "b/ooks": {"loss": 3 + step / 100}}
            if step % 20 == 0 and lr < 0.01
            else None,
            mfu=0.25,
            data_wait_s=0.2,
        )
        for step in range(1, steps + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{to_json(record)}\n" for record in records) + '{"step": 41, "lo')
    (folder / "heartbeat.json").write_text(json.dumps({"step": steps, "doing": doing}))
    (folder / "nodes.json").write_text(json.dumps([{"rank": 0, "data": 0}, {"rank": 1, "data": 1}]))
    if summary:
        (folder / "summary.json").write_text(json.dumps(summary))
    return folder


@pytest.fixture
def runs(tmp_path: Path) -> list[Path]:
    """One that is complete, and one that went wrong."""
    profile = {"terms_s": {"compute": 0.75, "bubble": 0.25}}
    first = make_run(tmp_path / "sweep" / "2", 0.001, parameters=558_144, profile=profile)
    return [first, make_run(tmp_path / "sweep" / "10", 0.1, steps=35, doing="failed")]


def report(*words: object) -> tuple[subprocess.CompletedProcess[str], Page]:
    output = next(Path(str(word)) for word in words if str(word).endswith(".html"))
    done = called("tools/report", *words)
    return done, Page(output.read_text(encoding="utf-8") if output.exists() else "")


def test_the_table_of_a_sweep(runs: list[Path], tmp_path: Path) -> None:
    """A folder of runs, in the order of their numbers; the best figures of each column are marked."""
    done, page = report(tmp_path / "sweep", "--output", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    heads, good, bad = page.row("run"), page.row("2"), page.row("10")
    assert [row[0] for row in page.rows[1:3]] == ["2", "10"]
    figures = dict(zip(heads, good, strict=True))
    assert (figures["state"], figures["step"], figures["tokens"]) == ("complete", "40 / 40", "40.0k")
    assert figures["layout"] == "data 2"  # which RECIPE leaves to the number of processes
    assert (figures["weights"], figures["validation"], figures["MFU"]) == ("558.1k", "4.0010", "25.0%")
    assert (figures["perplexity"], figures["memory"]) == (f"{math.exp(4.001):.4g}", "23.10 GiB")
    assert (figures["tokens/s"], figures["data wait"], figures["restarts"]) == ("12.3k", "10.0%", "0")
    broken = dict(zip(heads, bad, strict=True))
    assert (broken["state"], broken["step"], broken["skipped"], broken["restarts"]) == ("failed", "35 / 40", "1", "1")
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert 'class="best">4.0010<' in text
    assert 'class="best">4.1000<' not in text
    (tmp_path / "sweep/2/checkpoints").mkdir(exist_ok=True)
    _, page = report(tmp_path / "sweep/2/checkpoints/..", "--output", tmp_path / "r.html")
    assert page.rows[1][0] == "2"


def test_the_verdict_on_two_runs(runs: list[Path], tmp_path: Path) -> None:
    one, two = (open_run(folder, folder.name) for folder in runs)
    loss, validation, speed, keys = compare(one, two)
    assert loss.startswith("Loss: 2 is better, 2.5")  # after the 35 steps of the other one, whose loss is 10 higher
    assert " against 12.4" in loss
    assert loss.endswith(" after 35.0k tokens. Single steps differ by up to 79%.")
    assert validation == "Validation loss: 2 is better, 4.0010 against 4.1000 after 20.0k tokens."
    assert speed == "Speed: equal within 1%, 12.3k tokens/s."
    assert keys == "Configuration: optimizer.lr (0.001 / 0.1)."
    assert compare(one, one)[0] == "Loss: equal bit for bit in all 40 common steps."
    for factor, said in (
        (1 + 1e-9, "equal up to rounding (relative difference at most 1.0e-09)"),
        (1.001, "2 is better"),
    ):
        other = replace(one, name="other", records=[{**line, "loss": factor * line["loss"]} for line in one.records])
        assert said in compare(one, other)[0]
    records = [{**line, "validation_loss": line.get("validation_loss", math.nan) + 1e-6} for line in one.records]
    assert compare(one, replace(one, records=records))[1] == "Validation loss: equal, 4.0010 after 40.0k tokens."
    fast = replace(one, name="fast", records=[{**line, "tokens_per_s": 3e4} for line in one.records])
    assert compare(one, fast)[2] == "Speed: fast is 2.43 times as fast, 30.0k against 12.3k tokens/s."
    assert not compare(one, replace(one, records=[]))[:-1]
    report(*runs, "--output", tmp_path / "r.html")
    assert loss in (tmp_path / "r.html").read_text(encoding="utf-8")


def test_configurations_faults_and_times(runs: list[Path], tmp_path: Path) -> None:
    old = (runs[0] / "config.yaml").read_text(encoding="utf-8")  # a run of a version with other names of keys
    old = old.replace("straggler_every:", "slow_every:").replace("virtual_stages:", "virtual:")
    (runs[0] / "config.yaml").write_text(old, encoding="utf-8")
    _, page = report(*runs, "--output", tmp_path / "r.html")
    differing = next(row for row in page.rows if "optimizer.lr" in row)
    assert differing == ["run", "optimizer.lr"]
    events = [row[1:] for row in page.rows if row[0] == "10" and len(row) == 3 and not row[2].startswith("/")]
    assert ["10", "slow ranks: 3 (1.72x)"] in events
    assert ["26", "skipped: the gradients were not finite"] in events
    assert ["31", "continues from the checkpoint of step 30"] in events
    assert ["35", "the run failed"] in events
    assert ["lambada/accuracy"] in [row[1:] for row in page.rows]
    place = next(number for number, row in enumerate(page.rows) if row == ["run", "web", "b/ooks"])
    assert page.rows[place + 1 : place + 3] == [["2", "4 (54.6)", "3.4 (29.96)"], ["10", "-", "-"]]
    assert "Validation loss of each source" in (tmp_path / "r.html").read_text(encoding="utf-8")
    assert any("compute 75.0%" in cell for row in page.rows for cell in row)
    drawn = [tag for tag, _ in page.tags].count("svg")
    assert drawn == 11  # no loss scale; experts' load, least load and what is dropped
    assert {attributes.get("stroke") for tag, attributes in page.tags if tag == "polyline"} == set(COLOURS[:2])


def test_the_page_needs_no_network_and_runs_nothing(runs: list[Path], tmp_path: Path) -> None:
    _, page = report(*runs, "--output", tmp_path / "r.html")
    assert not {tag for tag, _ in page.tags} & {"script", "link", "img", "iframe", "object", "base", "form", "a"}
    assert not any(
        name in ("src", "href") or name.startswith("on") for _, attributes in page.tags for name in attributes
    )
    (policy,) = [each["content"] for tag, each in page.tags if each.get("http-equiv") == "Content-Security-Policy"]
    assert policy == "default-src 'none'; style-src 'unsafe-inline'"
    assert not any(each.get("http-equiv") == "refresh" for _, each in page.tags)


def test_hostile_names_and_values_stay_text(tmp_path: Path) -> None:
    evil = '"><script>alert(1)</script>\x1b[2J'
    first = make_run(tmp_path / evil.replace("/", "_"), 0.1, evil=evil, profile={"terms_s": {evil: 1.0}})
    second = make_run(tmp_path / "plain", 0.1)
    values = json.dumps(
        {"optimizer": {evil: evil}, "train": {"steps": evil}, "parallel": {"schedule": evil, "pipeline": 2}}
    )
    (first / "config.yaml").write_text(values)
    lines = [
        {"step": 1, "loss": evil, "tokens": 10**400, "slow_ranks": {evil: evil}},
        {"step": 2, "evaluation": {evil: evil}, "validation_sources": evil},
        {"step": 2, "validation_sources": {evil: {"loss": 1e308}, "a": evil, "b": {"loss": evil}}},
    ]
    lines += [
        {"step": 3, "experts": evil, "evaluation": {evil: 1e308}, "skipped": True},
        {"step": 10**30, "loss": 1e308},
    ]
    (first / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
    (first / "heartbeat.json").write_text(json.dumps({"doing": evil, "step": evil}))
    (first / "nodes.json").write_text(json.dumps([evil, {"data": evil}]))
    (first / "summary.json").unlink()
    done, page = report(first, second, "--output", tmp_path / "r.html")
    assert done.returncode == 0, done.stderr
    assert not any(tag == "script" for tag, _ in page.tags)
    text = (tmp_path / "r.html").read_text(encoding="utf-8")
    assert "&lt;script&gt;" in text
    assert "\x1b" not in text


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("figure", [1e308, -1e308, 5e-324, -1, 0, 10**30, 10**400, math.nan, math.inf, -math.inf, True])
def test_absurd_figures_leave_a_page_and_no_warning(tmp_path: Path, figure: float) -> None:
    names = [*_NUMBERS, "experts", "validation_sources"]
    usual = dict.fromkeys(_NUMBERS, 1.0)
    nested = {"experts": {"load": figure}, "validation_sources": {"a": {"loss": figure}}}
    for name in names:
        folder = tmp_path / name
        folder.mkdir()
        odd = {name: nested.get(name, figure)}
        lines = [{**usual, "tokens": step, **(odd if step % 2 else {})} for step in range(4)]
        (folder / "metrics.jsonl").write_text("\n".join(map(json.dumps, lines)))
        assert "</html>" in render([folder])
    (folder / "metrics.jsonl").write_text(
        "\n".join(json.dumps({**dict.fromkeys(names, figure), **nested}) for _ in "1234")
    )
    assert "</html>" in render([folder])


DAMAGE: dict[str, tuple[str, str, str]] = {
    "not YAML": ("config.yaml", "a: [", "config.yaml: is not a configuration"),
    "a list": ("config.yaml", "- 1", "config.yaml: is not a configuration (it is not a mapping of keys)"),
    "many keys": (
        "config.yaml",
        "a: &a {x: 1, y: 2}\nb1: &b1 {x: *a, y: *a}\n"
        + "".join(f"b{n}: &b{n} {{x: *b{n - 1}, y: *b{n - 1}}}\n" for n in range(2, 30)),
        "more than 10,000 settings",
    ),
    "not JSON": ("summary.json", "{", "summary.json: is not JSON"),
    "no array": ("nodes.json", "{}", "nodes.json: is not a JSON array"),
    "no object": ("heartbeat.json", "[]", "heartbeat.json: is not a JSON object"),
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_folder_is_one_message(tmp_path: Path, name: str) -> None:
    file, content, says = DAMAGE[name]
    folder = make_run(tmp_path / "run", 0.001)
    (folder / file).write_text(content)
    done, _ = report(folder, "--output", tmp_path / "r.html")
    assert (done.returncode, done.stdout) == (2, "")
    assert says in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "r.html").exists()


def test_damaged_lines_are_named_once_and_the_others_shown(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A last line that is cut off, as a kill leaves it, is no damage."""
    folder = make_run(tmp_path / "run", 0.001)
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    assert lines[-1] == '{"step": 41, "lo'
    render([folder])
    assert not caplog.messages
    lines[2], lines[9] = lines[2][:40], "[1]"
    lines[20:20] = ['{"step": NaN, "loss": 1.0}', "", '{"step": -3, "loss": 1.0}']
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    for _ in range(2):
        page = Page(render([folder]))
    assert page.rows[1][7:9] == ["-", "40 / 40"]
    rule = "a record is a JSON object whose step is an integer from 0 on"
    assert caplog.messages == [f"{folder}/metrics.jsonl: damaged lines skipped: 4 (line 3, 10, 21, 23): {rule}"]
    (folder / "metrics.jsonl").write_text("\n".join(["?"] * 9))
    render([folder])
    assert caplog.messages[1:] == [
        f"{folder}/metrics.jsonl: damaged lines skipped: 8 (line 1, 2, 3, 4, 5, ...): {rule}"
    ]


def test_folders_that_are_no_runs(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    done, _ = report(tmp_path / "empty", "--output", tmp_path / "r.html")
    assert f"{tmp_path}/empty: is not a run folder" in done.stderr
    done, _ = report(tmp_path / "nothing", "--output", tmp_path / "r.html")
    assert "No such file or directory" in done.stderr
    folder = make_run(tmp_path / "run", 0.001)
    (folder / "summary.json").symlink_to("/etc/passwd")
    done, _ = report(folder, "--output", tmp_path / "r.html")
    assert "summary.json: is a symbolic link" in done.stderr
    done, _ = report(make_run(tmp_path / "good", 0.001), "--output", tmp_path / "empty" / "no" / "r.html")
    assert "cannot write" in done.stderr


def test_serving_to_this_machine_only(runs: list[Path]) -> None:
    with make_server(runs, 0) as server:
        assert server.server_address[0] == "127.0.0.1"
        threading.Thread(target=server.serve_forever, daemon=True).start()
        root = f"http://127.0.0.1:{server.server_address[1]}"

        def get(path: str, **headers: str) -> str:
            request = urllib.request.Request(root + path, headers=headers)
            return urllib.request.urlopen(request, timeout=60).read().decode()

        page = Page(get("/"))
        assert [row[0] for row in page.rows[1:3]] == ["2", "10"]
        assert ("meta", {"http-equiv": "refresh", "content": str(REFRESH_SECONDS)}) in page.tags
        for path, headers, status in (("/../config.yaml", {}, 404), ("/", {"Host": "evil.example:80"}, 403)):
            with pytest.raises(urllib.error.HTTPError) as error:
                get(path, **headers)
            assert error.value.code == status
        with (runs[1] / "metrics.jsonl").open("a") as file:  # the run goes on
            file.write("\n" + to_json(replace(RECORD, step=36, tokens=36_000)) + "\n")
        assert "36 / 40" in get("/")
        (runs[0] / "summary.json").write_text("{")
        assert "is not JSON" in get("/")
        server.shutdown()


def test_a_sweep_that_was_started_twice(tmp_path: Path) -> None:
    """What Hydra's sweep leaves: runs that the same words with more steps continue."""
    words = (*SMALL, "data=synthetic", "model.vocab=64", "validation.every=0", "checkpoint.every=2", "train.device=cpu")
    words += (
        f"train.output={tmp_path}/sweep/${{optimizer.lr}}",
        "optimizer.lr=1e-3,2e-3",
        f"hydra.sweep.dir={tmp_path}",
    )
    for steps in (2, 4):
        done = called("pretrain", "--multirun", *words, f"train.steps={steps}")
        assert done.returncode == 0, done.stderr
    _, page = report(tmp_path / "sweep", "--output", tmp_path / "r.html")
    for name in ("0.001", "0.002"):
        assert [line.get("continued_from") for line in metrics(tmp_path / "sweep" / name)] == [None, None, 2, None]
        figures = dict(zip(page.row("run"), page.row(name), strict=True))
        assert (figures["state"], figures["step"], figures["restarts"]) == ("complete", "4 / 4", "1")
        assert [name, "3", "continues from the checkpoint of step 2"] in page.rows
    assert ["run", "optimizer.lr"] in page.rows


def test_round_numbers_and_few_points() -> None:
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0.13, 0.31) == pytest.approx([0.15, 0.2, 0.25, 0.3])
    assert ticks(3, 3) == [3]
    x, y = thin(Line("a", "red", np.arange(100_000.0), np.where(np.arange(100_000) % 2, np.nan, 7.0)))
    assert len(x) == 500
    assert set(y.tolist()) == {7.0}
    assert np.all(np.diff(x) > 0)


def test_figures_that_matter_come_first_and_names_stay_while_a_table_scrolls(runs: list[Path], tmp_path: Path) -> None:
    """On a phone too: the names of runs stick, and each table scrolls inside its card instead of being cut off."""
    _, page = report(*runs, "--output", tmp_path / "r.html")
    first = ["run", "state", "loss", "validation", "perplexity", "tokens/s", "MFU", "goodput"]
    assert page.rows[0][: len(first)] == first
    pages = [(tmp_path / "r.html").read_text(), (repository() / "pangu/report/layouts.html").read_text()]
    for text in pages:
        assert text.count("<table") == text.count('<div class="card"><table') > 0
        assert ".card{" in text
        assert "overflow-x:auto" in text.split(".card{")[1].split("}")[0]
        assert "@media(max-width:600px)" in text
        assert ("meta", {"name": "viewport", "content": "width=device-width"}) in Page(text).tags
    assert "position:sticky;left:0" in pages[0].split("\ntd.run{")[1].split("}")[0]
    style = [text.split(".card{")[1].split("}")[0] for text in pages]
    assert style[0] == style[1], "a plan's page has the style of a report"
    block = pages[0].partition("</style>")[2].partition("<table")[0]
    for name, text in zip(page.rows[0], page.rows[1], strict=True):
        if name in ("loss", "validation", "tokens/s", "MFU", "goodput"):
            assert f"<span>{name} <b>{text}</b></span>" in block
    assert "flex-wrap:wrap" in pages[0].split("\n.legend{")[1].split("}")[0]


def test_charts_are_readable_on_a_phone(runs: list[Path]) -> None:
    check_style(render(runs))


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_browser_shows_readable_charts_on_a_phone(runs: list[Path], tmp_path: Path) -> None:
    check_in_browser(render(runs), tmp_path)


@pytest.mark.skipif(CHROMIUM is None, reason="no chromium")
def test_a_browser_shows_the_curves(runs: list[Path], tmp_path: Path) -> None:
    report(*runs, "--output", tmp_path / "r.html")
    picture = tmp_path / "page.png"
    words = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    words += ["--window-size=1300,1600", f"--screenshot={picture}", f"file://{tmp_path / 'r.html'}"]
    subprocess.run([str(CHROMIUM), *words], capture_output=True, timeout=300, check=True)
    pixels = (matplotlib.image.imread(picture)[..., :3] * 255).round().astype(int)
    for colour in COLOURS[:2]:
        wanted = [int(colour[place : place + 2], 16) for place in (1, 3, 5)]
        places = np.argwhere((np.abs(pixels - wanted) < 12).all(-1))
        assert len(places) > 500  # lines, not only the squares of the legend
        assert np.ptp(places[:, 1]) > 800  # in charts beside one another
