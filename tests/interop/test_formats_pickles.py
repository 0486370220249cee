"""Files of torch.save: what holds no plain tensors is refused with one message, before anything is unpacked or run."""

from __future__ import annotations

import enum
import signal
import struct
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from pangu.common.errors import UserError
from pangu.interop.formats.pickles import Record, load_pickle
from tests.interop.test_formats import HEADS, weights
from tests.references import foreign_checkpoints as foreign
from tools.convert_checkpoint import main


def refusal(path: Path) -> str:
    with pytest.raises(UserError) as error:
        load_pickle(path)
    assert str(error.value).isprintable()
    return str(error.value)


def compress(path: Path) -> None:
    """The same archive with its entries deflated, as `zip` makes it."""
    with zipfile.ZipFile(path) as archive:
        entries = {entry.filename: archive.read(entry) for entry in archive.infolist()}
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in entries.items():
            archive.writestr(name, content)


def test_compressed_entries_are_refused(tmp_path: Path) -> None:
    """Their bytes were taken for the tensors'. A small file is refused before it unpacks to a large one."""
    file = tmp_path / "a.pt"
    torch.save(weights(), file)
    compress(file)
    assert "data.pkl is compressed, but torch.save compresses nothing" in refusal(file)
    torch.save({"weight": torch.zeros(2**22)}, file)
    compress(file)
    assert file.stat().st_size < 2**17
    assert "is compressed" in refusal(file)


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda: torch.zeros(8, device="meta"), "is on the device meta"),
        (lambda: torch.eye(8).to_sparse(), "is sparse_coo"),
        (lambda: torch.eye(8).to_sparse_csr(), "is sparse_csr"),
        (lambda: torch.zeros(1).expand(2**40), "repeats elements"),
        (lambda: torch.quantize_per_tensor(torch.zeros(8), 1.0, 0, torch.qint8), "is quantized"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_tensors_without_bytes_of_their_own(make: Callable[[], torch.Tensor], words: str, tmp_path: Path) -> None:
    torch.save({"model": [{"a\0b": make()}]}, tmp_path / "a.pt")
    said = refusal(tmp_path / "a.pt")
    assert words in said
    assert "a.pt: model.0.a\\x00b " in said


def test_numbers_that_no_format_holds_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    foreign.write_megatron_port(tmp_path / "in", weights(), 1, rows=128, heads=HEADS, extras=False)
    file = tmp_path / "in" / "iter_0001000" / "mp_rank_00" / "model_optim_rng.pt"
    state = torch.load(file, weights_only=False)
    four_bits = torch.zeros(32, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    state["model"]["language_model"]["transformer"]["final_layernorm.bias"] = four_bits
    torch.save(state, file)
    words = ["--from", "megatron", "--to", "pangu", "--input", str(tmp_path / "in"), "--output", str(tmp_path / "out")]
    assert main(words) == 2
    assert "transformer.final_layernorm.bias: torch.float4_e2m1fn_x2" in capsys.readouterr().err


@pytest.mark.parametrize("content", [b"", b"\0" * 1000, b"PK\5\6" + bytes(18), b"PK\3\4" + bytes(100), b"\x80\x02."])
def test_bytes_that_are_no_file_of_torch(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "a.pt").write_bytes(content)
    assert str(tmp_path / "a.pt") in refusal(tmp_path / "a.pt")


class Colour(enum.Enum):
    """An enumeration that no checkpoint keeps."""

    RED = 1


def test_what_lies_beside_the_weights_is_inert(tmp_path: Path) -> None:
    """Paths, signals and their like say what they are and do nothing; a file may refer to itself."""
    state: dict[str, Any] = {"model": {"a": torch.ones(2)}, "path": Path("/etc"), "signal": signal.SIGTERM}
    state["self"] = state
    torch.save(state, tmp_path / "a.pt", pickle_protocol=3)
    with warnings.catch_warnings(action="error"):
        found = load_pickle(tmp_path / "a.pt")
    assert torch.equal(found["model"]["a"], torch.ones(2))
    assert isinstance(found["path"], Record)
    assert found["signal"].name in ("signal.Signals", "signal.SIGTERM")  # the latter by Python 3.11.2
    torch.save({"model": {}, "colour": Colour.RED}, tmp_path / "a.pt")
    assert "holds tests.interop.test_formats_pickles.Colour" in refusal(tmp_path / "a.pt")
    torch.save({"model": {}}, tmp_path / "a.pt", pickle_protocol=4)
    assert "holds Unsupported operand 149, which" in refusal(tmp_path / "a.pt")


def test_entries_are_no_longer_than_the_file(tmp_path: Path) -> None:
    """Memory was asked for whatever size a directory of a few bytes names."""
    torch.save({"a": torch.ones(2)}, tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    entry = content.index(b"PK\1\2")
    struct.pack_into("<II", content, entry + 20, 2**31, 2**31)
    (tmp_path / "a.pt").write_bytes(content)
    assert "data.pkl is longer than the file" in refusal(tmp_path / "a.pt")
