import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
LIMIT_S = 100


def test_a_quick_run_fills_the_page(tmp_path):
    page = tmp_path / "benchmarks.md"
    page.write_text(Path(ROOT, "docs/benchmarks.md").read_text(encoding="utf-8"), encoding="utf-8")
    command = [sys.executable, str(ROOT / "benchmarks/relay.py"), "--quick", "--docs", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    text = page.read_text(encoding="utf-8")
    assert "| upstream bytes, of those published | 1.00 | 1.0 | yes |" in text
    assert "Through one relay: 4 readers of 2 messages of 0.1 MB" in text
    assert text.count("<!-- end of relay -->") == 1
    assert "## Catching up" in text
