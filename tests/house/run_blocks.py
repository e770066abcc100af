"""Run the Python blocks of one Markdown file, as a reader would who copies them one after the other.

Usage: python run_blocks.py FILE

A block that begins with `>>>` is a session, whose answers are compared; any other is run. All share one namespace.
A block whose fence says `no-run` is left out.
"""

import doctest
import re
import sys
import textwrap
from pathlib import Path

FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[\w+-]*)(?P<marks>[^\n`]*)\n(?P<code>.*?)^(?P=indent)```[ ]*$", re.M | re.S
)


def python_blocks(text):
    """Each block to run, as (line of its first line, code).

    Raises:
        ValueError: If a fence has a mark or a name of Python that would leave it out unseen.
    """
    for match in FENCE.finditer(text):
        line = text.count("\n", 0, match.start("code")) + 1
        language, marks = match["language"].lower(), match["marks"].strip()
        if language in {"py", "python3", "pycon"}:
            raise ValueError(f"line {line - 1}: write ```python, not ```{language}, so that the block is run")
        if language == "python" and marks not in {"", "no-run"}:
            raise ValueError(f"line {line - 1}: ```python may be followed by no-run, not by {marks!r}")
        if language == "python" and not marks:
            yield line, textwrap.dedent(match["code"])


def run(path):
    namespace = {"__name__": "__main__"}
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for line, code in python_blocks(path.read_text(encoding="utf-8")):
        if code.lstrip().startswith(">>>"):
            session = doctest.DocTestParser().get_doctest(code, namespace, path.name, str(path), line - 1)
            runner.run(session, clear_globs=False)
            namespace.update(session.globs)
        else:
            # The empty lines before make a traceback name the line of the Markdown file.
            exec(compile("\n" * (line - 1) + code, str(path), "exec"), namespace)
    return runner.summarize(verbose=False).failed


if __name__ == "__main__":
    sys.exit(run(Path(sys.argv[1])) > 0)
