"""The safe replacements of logging and tqdm in a block: they print, and do nothing else."""

from __future__ import annotations

import pytest

from tests.sandbox.protector.running import guarded, protector, refusal


def test_logger_prints_records_at_or_above_its_level(capsys: pytest.CaptureFixture[str]) -> None:
    protector().objects({})
    guarded("""
import logging
from logging import getLogger
logger = getLogger("a.b")
if not logger.handlers:
    handler = logging.StreamHandler()
    handler.setFormatter(logging.Formatter("%(message)s"))
    logger.addHandler(handler)
logger.debug("hidden")
logger.info("%s is %d", "one", 1)
logger.info("%(name)s", {"name": "named"})
logger.warning("%d is wrong", "this")
logging.getLogger("a").setLevel("DEBUG")
logger.debug("shown")
logging.error("of the root")
try:
    1 / 0
except ZeroDivisionError:
    logger.exception("failed")
""")
    assert capsys.readouterr().out.splitlines() == [
        "INFO | a.b | one is 1",
        "INFO | a.b | named",
        "WARNING | a.b | %d is wrong this",
        "DEBUG | a.b | shown",
        "ERROR | root | of the root",
        "ERROR | a.b | failed",
        "ZeroDivisionError: division by zero",
    ]
    # The next request starts with default levels.
    protector().objects({})
    guarded("import logging\nlogging.getLogger('a.b').debug('hidden')")
    assert capsys.readouterr().out == ""


def test_tqdm_yields_items_and_prints_progress(capsys: pytest.CaptureFixture[str]) -> None:
    protector().objects({})
    names = guarded("""
import torch, tqdm
from tqdm.auto import trange, tqdm as auto
without_length = list(auto(each for each in "ab"))
ranged = [*trange(1, 3)]
with tqdm.tqdm(total=4, desc="named", disable=True) as bar:
    bar.update(2)
    bar.set_postfix(loss=1)
    n = bar.n
tensor = torch.arange(3)
rows = [int(each) for each in auto(tensor, leave=False)] + [tensor[1] in auto(tensor, leave=False)]
same = tqdm.tqdm is auto and isinstance(bar, auto)
auto.write("a line")
""")
    assert names["without_length"] == ["a", "b"]
    assert names["ranged"] == [1, 2]
    assert names["n"] == 2
    assert names["rows"] == [0, 1, 2, True]
    assert names["same"] is True
    assert capsys.readouterr().out.splitlines() == ["2 it, 0 s", "a line"]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("import logging.handlers as h\nh.SocketHandler", "module 'logging.handlers' is not available"),
        ("import logging\nlogging.FileHandler('x')", "logging.FileHandler is not available"),
        ("from logging import config", "logging.config is not available"),
        ("import logging\nlogging.basicConfig(filename='x')", "goes to its LOG"),
        ("import logging\nlogging.getLogger('a').manager", "no attribute 'manager'"),
        ("import logging\nlogging.getLogger = print", "it is protected"),
        ("from tqdm import tqdm\ntqdm.write = print", "your own code does not define it"),
        ("from tqdm.contrib import telegram\ntelegram.x", "is not available on this server"),
        ("import tqdm\ntqdm.tqdm.pandas()", "no attribute 'pandas'"),
    ],
)  # fmt: skip
def test_other_logging_and_tqdm_functions_are_refused(source: str, message: str) -> None:
    assert message in refusal(source)[0]
