"""The report: one file that needs nothing else, in the reader's order, and readable in a browser."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from artifact_fixture import main_rows, row, trace, write_records, write_table

from figures import results
from figures.results import AIMS
from harness import claims, report, report_tables
from harness.claim_verdict import load

BROWSER = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
ORDER = ("Claims", "Figures", "Tables", "Environment", "Efficiency", "Running it again")


@pytest.fixture(scope="module")
def page(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("results")
    rows = [r for r in main_rows() if r["model"] == "phi35_moe"]
    rows.append(row(model="phi35_moe", system="vllm", status="oom", reason="<b>out of memory</b>", tpot_ms=None))
    write_records(folder / "main", rows)
    write_table(folder / "aims.csv", AIMS, [dict.fromkeys(AIMS, "1") | {"aim": "link utilisation"}])
    (folder / "bench").mkdir()
    (folder / "bench" / "window.csv").write_text("model,over_bound\n" + "m,0.123456789\n" * 70)
    (folder / "traces").mkdir()
    (folder / "traces" / "expertwise.json").write_text(json.dumps(trace("expertwise")))
    gpu = {"name": "GPU X", "memory_bytes": 40e9, "driver": "1.2", "power_limit_w": 250.0}
    gpu |= {"clocks_mhz": {"sm": {"now": 300, "highest": 1980, "applications": None}}}
    gpu |= {"pcie": {"highest_generation": 5, "highest_width": 16}}
    environment = {
        "gpus": [gpu],
        "link_gb_per_s": 54.84,
        "numa_nodes": {"0": "0-15"},
        "torch": "2.11.0+cu130",
        "weights": {"phi35_moe": "abc"},
        "git_commit": "abc",
    }
    (folder / "main" / "environment.json").write_text(json.dumps(environment))
    return report.write(folder, tmp_path_factory.mktemp("report") / "report.html", draws=2)


def test_it_comes_in_the_readers_order_with_every_claim(page):
    text = page.read_text()
    places = [text.index(f">{name}</h2>") for name in ORDER]
    assert places == sorted(places)
    assert all(claim.id in text for claim in load(claims.CLAIMS))


def test_it_is_one_file_that_fetches_nothing(page):
    text = page.read_text()
    sources = re.findall(r'(?:src|href)="([^"]*)"', text)
    assert sources and all(s.startswith(("data:image/png;base64,", "#")) for s in sources)
    assert "<script" not in text and "@import" not in text


def test_figures_are_inside_and_absent_ones_say_why(page):
    text = page.read_text()
    assert text.count('src="data:image/png') == 5  # figures 8, 9, 14, table 2 and memory
    assert "fig15_batch</code>: records at two or more batch sizes" in text


def test_the_papers_platform_stands_beside_this_one(page):
    text = page.read_text()
    for stated in ("NVIDIA A100, 40 GB HBM", "4.53.3", "4.0.0.dev0 at 037c5c0", "PCIe 4.0 x16, 31.5 GB/s"):
        assert stated in text
    assert "PCIe 5 x16, 54.8 GB/s measured" in text and "sm 1980, set ? MHz" in text and "0: CPUs 0-15" in text
    assert "GPU X, 40 GB" in text and "1.2, 250 W" in text and "13.0 (torch)" in text


def test_failures_and_aims_are_listed_and_text_is_escaped(page):
    text = page.read_text()
    assert "&lt;b&gt;out of memory&lt;/b&gt;" in text and "<b>out" not in text
    assert "link utilisation" in text


def test_csv_files_of_benches_are_shown_whatever_their_columns(page):
    text = page.read_text()
    assert "<code>bench/window.csv</code> (70 lines, the first 60 shown)" in text
    assert "<th>over_bound</th>" in text and "0.1235</td>" in text


def test_every_folder_of_the_results_has_a_line(page):
    text = page.read_text()
    assert "Where the numbers come from" in text and "<td>main</td>" in text
    assert "160 of 161 requests ok" in text and "expertwise.json" in text


def test_an_empty_folder_makes_a_report_without_numbers(tmp_path):
    (tmp_path / "results").mkdir()
    text = report.write(tmp_path / "results", tmp_path / "out" / "report.html", draws=0).read_text()
    assert "0 requests" in text and text.count(">NOT RUN</span></td>") == len(load(claims.CLAIMS))


def test_every_sweep_has_a_line_that_says_how_to_run_it_again(tmp_path):
    import pandas as pd

    from harness import catalogue

    models = pd.DataFrame({"model": [], "model_bytes": []})
    body = report_tables.reruns(results.read(tmp_path), models).body
    for name in catalogue.names("sweep"):
        assert any(line[0] == name and "python run.py" in line[2] for line in body)


@pytest.mark.skipif(BROWSER is None, reason="no Chromium here")
def test_a_browser_shows_it(page, tmp_path):
    from matplotlib import image

    shot = tmp_path / "report.png"
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--window-size=1240,1600"]
    subprocess.run(
        [*command, f"--user-data-dir={tmp_path}/profile", f"--screenshot={shot}", page.as_uri()],
        check=True,
        timeout=120,
        capture_output=True,
    )
    pixels = image.imread(shot)[..., :3]
    assert pixels.shape[1] == 1240
    inked = (pixels < 0.5).all(axis=2).mean(axis=1)
    assert (inked > 0).mean() > 0.15  # lines of text down the page, not a blank one


def test_the_committed_results_give_a_report(tmp_path):
    """What a reviewer runs: make report RESULTS=results."""
    root = Path(__file__).resolve().parents[1]
    out = tmp_path / "report.html"
    done = subprocess.run(
        [sys.executable, "-m", "harness.report", "--results", "results", "--out", str(out)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    text = out.read_text(encoding="utf-8")
    assert "NVIDIA H200" in text and "draft step" in text
