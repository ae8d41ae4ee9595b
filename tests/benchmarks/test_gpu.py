"""The trainer's benchmark in its small form: both contestants run on a CPU, and the table says what was measured."""

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
HEADER = "| model | tokens | document | weights | compile | plain loop, tokens/s | trainer, tokens/s | ratio | bar |"


def test_the_trainer_and_a_plain_loop_are_measured_in_one_run(tmp_path):
    small = ["--models", "tiny", "--tokens", "256", "--document", "64", "--head-tokens", "100", "--repeats", "2"]
    table = tmp_path / "table.md"
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu"), *small, "--compile", "no", "--output", str(table)]
    subprocess.run(command, check=True, timeout=120)
    header, _, line = table.read_text().splitlines()
    assert header.startswith(HEADER)
    name, tokens, document, held, compiled, plain, trainer, ratio = [cell.strip() for cell in line.split("|")[1:9]]
    assert (name, tokens, document, held, compiled) == ("tiny", "256", "64", "float32", "no")
    speeds = [float(cell.replace(",", "")) for cell in (plain, trainer)]
    assert min(speeds) > 0
    least, most = (speeds[1] - 0.5) / (speeds[0] + 0.5), (speeds[1] + 0.5) / (speeds[0] - 0.5)
    assert least - 0.005 <= float(ratio) <= most + 0.005, "speeds are rounded to tokens, the ratio to hundredths"


def test_the_document_has_the_table_that_the_benchmark_writes():
    lines = (ROOT / "docs" / "internals" / "gpu.md").read_text().splitlines()
    assert [line for line in lines if line.startswith(HEADER)]
