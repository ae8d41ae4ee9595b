"""The trainer without torch: what the driver and the counting trainer need starts fast."""

import subprocess
import sys

import pytest

LIGHT = (
    "asyncflow.algorithms.advantages",
    "asyncflow.algorithms.loss",
    *(f"asyncflow.algorithms.{name}" for name in ("gspo", "cispo", "dapo", "reinforce", "pf_ppo", "dpo", "ipo")),
    "asyncflow.training.trainer",
    "asyncflow.training.counting",
)


@pytest.mark.process
def test_nothing_but_the_torch_backend_imports_torch() -> None:
    program = f"import sys, {', '.join(LIGHT)}; print(*({{'torch', 'transformers'}} & sys.modules.keys()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == ""
