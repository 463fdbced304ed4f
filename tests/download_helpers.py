"""Fixtures and small builders for the tests of the download tools."""

from __future__ import annotations

import contextlib
import hashlib
import importlib
import io
import json
import os
import random
import struct
import sys
from pathlib import Path
from typing import Any
from unittest import mock

from download_server import FileServer

REPO = Path(__file__).resolve().parents[1]
INIT = REPO / "initialization"
COMMIT = "0123456789abcdef0123456789abcdef01234567"
OTHER = "89abcdef0123456789abcdef0123456789abcdef"

if str(INIT) not in sys.path:  # the tools import their siblings as scripts do
    sys.path.append(str(INIT))


def module(name: str) -> Any:
    return importlib.import_module(name)


def random_bytes(count: int, seed: int = 0) -> bytes:
    return random.Random(seed).randbytes(count)


def sha256(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()


def archive(server: FileServer, file: str, body: bytes, /, **changes: Any) -> dict[str, Any]:
    """A manifest entry for `body`, which the server is given under /file."""
    server.put(f"/{file}", body)
    entry = {
        "name": file.split(".")[0],
        "kind": "archive",
        "description": "a test archive",
        "file": file,
        "url": f"{server.url}/{file}",
        "bytes": len(body),
        "sha256": sha256(body),
        "instead": "use the hub",
    }
    return {**entry, **changes}


def checkpoint_entry(**changes: Any) -> dict[str, Any]:
    entry = {
        "name": "tiny",
        "kind": "hub",
        "description": "a test checkpoint",
        "repo": "org/tiny",
        "revision": "main",
        "directory": "tiny/target",
        "licence": "MIT",
        "files": [{"path": "config.json", "bytes": None, "sha256": None}],
        "optional_files": ["tokenizer.json", "LICENSE"],
        "index": "model.safetensors.index.json",
        "tensor_bytes": None,
        "tensors": None,
    }
    return {**entry, **changes}


def safetensors(names: list[str], numbers: int) -> bytes:
    header, end = {}, 0
    for name in names:
        header[name] = {"dtype": "F16", "shape": [numbers], "data_offsets": [end, end + 2 * numbers]}
        end += 2 * numbers
    raw = json.dumps(header).encode()
    return struct.pack("<Q", len(raw)) + raw + random_bytes(end)


def hub(server: FileServer, files: dict[str, bytes], commit: str = COMMIT, branch: bool = True) -> None:
    """Serves a repository as hubs do: the commit in a header, shards behind a redirect with linked digest."""
    for revision in ("main", commit) if branch else (commit,):
        for path, body in files.items():
            route = f"/org/tiny/resolve/{revision}/{path}"
            headers = {"X-Repo-Commit": commit}
            if path.endswith(".safetensors"):
                server.put(f"/cdn/{commit}/{path}", body, get_only=True)
                headers |= {"X-Linked-Size": str(len(body)), "X-Linked-ETag": f'"{sha256(body)}"'}
                item = server.put(route, b"", headers=headers)
                item.redirect = f"{server.url}/cdn/{commit}/{path}"
            else:
                blob = hashlib.sha1(b"blob %d\0" % len(body) + body).hexdigest()
                server.put(route, body, headers=headers, etag=f'"{blob}"')


def tiny_checkpoint() -> dict[str, bytes]:
    first, second = safetensors(["a.weight", "b.weight"], 3000), safetensors(["c.weight"], 40_000)
    weight_map = {"a.weight": "model-1.safetensors", "b.weight": "model-1.safetensors"}
    index = {"metadata": {}, "weight_map": {**weight_map, "c.weight": "model-2.safetensors"}}
    return {
        "config.json": b'{"model_type": "tiny"}',
        "tokenizer.json": b"{}",
        "model.safetensors.index.json": json.dumps(index).encode(),
        "model-1.safetensors": first,
        "model-2.safetensors": second,
    }


def manifest(tmp_path: Path, *assets: dict[str, Any]) -> Path:
    path = tmp_path / "manifest.json"
    path.write_text(json.dumps({"format": 1, "assets": list(assets)}), encoding="utf-8")
    return path


def arguments(manifest_path: Path, out: Path, server: FileServer | None = None, *more: str) -> list[str]:
    hub_url = ["--hub-url", server.url] if server else []
    fast = ["--backoff-s", "0.001", "--timeout-s", "10", "--retries", "4"]
    return ["--manifest", str(manifest_path), "--output", str(out), *fast, *hub_url, *more]


class Ran:
    """Exit code, the JSON line and the error line of a run in this process."""

    def __init__(self, code: int, stdout: str, stderr: str) -> None:
        self.code, self.stderr = code, stderr
        self.json = json.loads(stdout.splitlines()[-1]) if stdout.strip() else None
        errors = [line for line in stderr.splitlines() if line.startswith("error: ")]
        assert "Traceback" not in stderr
        assert len(errors) == (1 if code in (1, 2) else 0), stderr
        self.error = errors[0] if errors else ""


def run_download(arguments: list[str], tool: str = "download_models") -> Ran:
    """Runs a tool in this process, without a proxy and without the user's choice of a hub."""
    stdout, stderr = io.StringIO(), io.StringIO()
    clean = {k: v for k, v in os.environ.items() if k != "HF_ENDPOINT"} | {"no_proxy": "127.0.0.1"}
    with (
        mock.patch.dict(os.environ, clean, clear=True),
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(stderr),
    ):
        try:
            code = module(tool).main(arguments)
        except SystemExit as stop:
            code = int(stop.code or 0)
    return Ran(code, stdout.getvalue(), stderr.getvalue())


def leftovers(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.rglob("*") if ".part" in p.name)
