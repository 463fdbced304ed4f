"""Small stand-ins for what a release is made of: a repository, wheels, datasets, a checkpoint and its draft."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import os
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from download_helpers import random_bytes, safetensors, sha256
from zipcrypto import encrypted_zip

REPO = Path(__file__).resolve().parents[1]
BUILD = REPO / "scripts" / "build_release.py"
PASSWORD = b"deserted-untie-orchid"
GPQA = b"Record ID,Question\nrec1,Invented for this test?\n"
ENVIRONMENT = {k: v for k, v in os.environ.items() if not k.startswith(("GIT_", "SPECTER_"))} | {
    "no_proxy": "127.0.0.1",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}
BACKEND = '''
"""Installs nothing but its name: the project of the stand-in repository."""
import zipfile
FIELDS = "Metadata-Version: 2.1\\nName: specter\\nVersion: 0.1.0\\nProvides-Extra: dev\\nRequires-Dist: torch\\n"
WHEEL = "Wheel-Version: 1.0\\nGenerator: test\\nRoot-Is-Purelib: true\\nTag: py3-none-any\\n"
def build_editable(folder, settings=None, metadata=None):
    name = "specter-0.1.0-py3-none-any.whl"
    with zipfile.ZipFile(folder + "/" + name, "w") as wheel:
        for file, text in (("METADATA", FIELDS), ("WHEEL", WHEEL), ("RECORD", "")):
            wheel.writestr("specter-0.1.0.dist-info/" + file, text)
    return name
'''
PYPROJECT = '[build-system]\nrequires = []\nbuild-backend = "backend"\nbackend-path = ["."]\n'


def put(path: Path, body: bytes | str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(body.encode() if isinstance(body, str) else body)
    return path


def git(folder: Path, *arguments: str) -> None:
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost", "-c", "commit.gpgsign=false"]
    subprocess.run(["git", "-C", str(folder), *identity, *arguments], check=True, env=ENVIRONMENT, capture_output=True)


def wheel(name: str, version: str) -> bytes:
    """A wheel with one module."""
    files = {
        f"{name}.py": f"VERSION = {version!r}\n",
        f"{name}-{version}.dist-info/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
        f"{name}-{version}.dist-info/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    record = ""
    for path, text in files.items():
        digest = base64.urlsafe_b64encode(hashlib.sha256(text.encode()).digest()).rstrip(b"=").decode()
        record += f"{path},sha256={digest},{len(text)}\n"
    body = io.BytesIO()
    with zipfile.ZipFile(body, "w") as packed:
        for path, text in {**files, f"{name}-{version}.dist-info/RECORD": record}.items():
            packed.writestr(path, text)
    return body.getvalue()


@dataclass(frozen=True)
class Inputs:
    """The folders that build_release.py is given."""

    source: Path
    wheels: Path
    datasets: Path
    target: Path
    draft: Path
    gpqa_sha256: str

    def arguments(self, output: Path, base_url: str) -> list[str]:
        folders = ("source", "wheels", "datasets", "target", "draft")
        given = [word for name in folders for word in (f"--{name}", str(getattr(self, name)))]
        return [*given, "--output", str(output), "--base-url", base_url, "--gpqa-sha256", self.gpqa_sha256]


def make_inputs(root: Path) -> Inputs:
    """`dataset.zip` as the authors publish it is there; gpqa_main.csv.zip is not."""
    source = root / "source"
    shutil.copytree(REPO / "initialization", source / "initialization", ignore=shutil.ignore_patterns("__pycache__"))
    put(source / "constraints.txt", "# pins\ntorch==2.13.0\n\nabsent_package==1.0\n")
    put(source / "pyproject.toml", PYPROJECT)
    put(source / "backend.py", BACKEND)
    put(source / "SHA256SUMS", "of an earlier release\n")
    put(source / ".gitignore", "ignored\n")
    put(source / "ignored", "not tracked")
    put(source / "a folder/ümlaut.txt", "tracked")
    git(source, "init", "-q")
    git(source, "add", ".")
    git(source, "commit", "-q", "-m", "stand-in")
    put(root / "wheels" / "torch-9.9+test-py3-none-any.whl", wheel("torch", "9.9+test"))
    put(root / "wheels" / "Gptq_Stub-4.0.0.dev0-py3-none-any.whl", wheel("gptq_stub", "4.0.0.dev0"))
    datasets = root / "datasets"
    for name, file in (("c4", "c4.jsonl"), ("wikitext2", "test.txt"), ("humaneval", "HumanEval.jsonl")):
        put(datasets / name / file, f"{name}\n")
    put(datasets / "gsm8k" / "test.jsonl", '{"question": "How many?", "answer": "3"}\n')
    put(datasets / "NOTICE.md", "licences\n")
    published = encrypted_zip({"dataset/other.csv": b"x", "dataset/gpqa_main.csv": GPQA}, PASSWORD)
    put(datasets / "gpqa" / "dataset.zip", published)
    put(root / "target" / "config.json", "{}")
    put(root / "target" / "tokenizer.json", "{}")
    put(root / "target" / "model.safetensors", safetensors(["a.weight"], 300_000))
    put(root / "draft" / "quantize_config.json", json.dumps({"bits": 4}))
    put(root / "draft" / "model.safetensors", random_bytes(50_000, seed=1))
    return Inputs(source, root / "wheels", datasets, root / "target", root / "draft", sha256(published))


def build(inputs: Inputs, output: Path, base_url: str, *more: str) -> subprocess.CompletedProcess[str]:
    return call([sys.executable, "-B", str(BUILD), *inputs.arguments(output, base_url), *more])


def call(command: Sequence[str], **environment: str) -> subprocess.CompletedProcess[str]:
    env = {**ENVIRONMENT, **environment}
    return subprocess.run(command, capture_output=True, text=True, env=env, check=False, timeout=120)


def refused(done: subprocess.CompletedProcess[str]) -> str:
    """The one error line of a run that ended with exit code 2."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert done.returncode == 2 and len(lines) == 1 and "Traceback" not in done.stderr, done.stderr
    return lines[0]
