"""Compares runs on one page: losses, rates, memory, MFU, waits, experts, faults and restarts, the keys of the
configuration that differ, and the final figures in a table. The page is one HTML file that needs no network.

RUN is a run folder, or a folder of runs, e.g. of a sweep. --serve shows the page on this machine only, refreshed every
few seconds, while runs are in progress."""

from __future__ import annotations

import argparse
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pangu_train  # noqa: F401 - recognizes a foreign package pangu
from pangu.common.commands import as_typed
from pangu.common.errors import UserError, writing
from pangu.common.exit_status import exit_status
from pangu.common.files import write_atomically
from pangu.report.page import render, render_problem

_EXAMPLE = """examples:
  python tools/report.py runs/quickstart
  python tools/report.py runs/adam runs/lamb --output comparison.html
  python tools/report.py runs/sweep
  python tools/report.py runs/quickstart --serve
"""
REFRESH_SECONDS = 5
_PORT = 6007


def parse(arguments: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=as_typed(_EXAMPLE), formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="run folder, or a folder of run folders")
    parser.add_argument("--output", type=Path, default=Path("report.html"), help="page to write (report.html)")
    parser.add_argument("--serve", action="store_true", help="serve the page to browsers on this machine instead")
    parser.add_argument("--port", type=int, help=f"port for --serve; 0: any free one ({_PORT})")
    options = parser.parse_args(arguments)
    if options.port is not None and not (options.serve and 0 <= options.port < 2**16):
        parser.error(f"--port {options.port}: needs --serve, and must be at most 65535")
    return options


def make_server(runs: list[Path], port: int) -> ThreadingHTTPServer:
    """A server of the one page, reached from this machine only. Raises UserError if the port is taken."""

    class PageHandler(BaseHTTPRequestHandler):
        """Answers GET / with the page as it is now."""

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").rpartition(":")[0]
            if host not in ("127.0.0.1", "localhost"):  # a page elsewhere whose name was made to lead here
                self.send_error(403)
            elif self.path != "/":
                self.send_error(404)
            else:
                try:
                    page = render(runs, REFRESH_SECONDS)
                except UserError as error:
                    page = render_problem(error, REFRESH_SECONDS)
                content = page.encode("utf-8", "replace")
                self.send_response(200)
                self.send_header("Content-Type", "text/html; charset=utf-8")
                self.send_header("Content-Length", str(len(content)))
                self.send_header("Cache-Control", "no-store")
                self.end_headers()
                self.wfile.write(content)

        def log_message(self, format: str, *arguments: object) -> None:
            """Requests are not logged."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), PageHandler)
    except OSError as error:
        raise UserError(f"--port {port}: {error.strerror}; use --port 0 for any free port") from error


def run(options: argparse.Namespace) -> None:
    """Carry out the command. Raises UserError."""
    page = render(options.runs)
    if options.serve:
        with make_server(options.runs, _PORT if options.port is None else options.port) as server:
            print(f"http://localhost:{server.server_address[1]}/ (until Ctrl-C)", flush=True)
            server.serve_forever()
    with writing(options.output):
        write_atomically(options.output, page.encode("utf-8", "replace"))
    print(f"{options.output}: {len(page) / 1e3:.0f} kB")


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    return exit_status(lambda: run(parse(arguments)))


if __name__ == "__main__":
    sys.exit(main())
