"""`hf-spec ui` as a separate process, used in a real headless browser."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest

from hf_spec.evaluation.trace.pictures import ACCEPTED
from tests.serving.conftest import folder, plain  # noqa: F401 - a fixture

pytest.importorskip("gradio", reason="needs the extra 'ui'")
pytest.importorskip("selenium", reason="needs the extra 'browser'")

from selenium import webdriver
from selenium.webdriver.common.by import By
from selenium.webdriver.common.keys import Keys
from selenium.webdriver.remote.webelement import WebElement
from selenium.webdriver.support.ui import WebDriverWait

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
pytestmark = [
    pytest.mark.full,
    pytest.mark.integration,
    pytest.mark.skipif(
        CHROMIUM is None or DRIVER is None,
        reason="needs the programs chromium and chromedriver (Debian: chromium, chromium-driver)",
    ),
]

# Timeout in seconds.
LIMIT = 90
NEW_TOKENS = 40
PROMPT = "babebi" * 4
# Fixed lengths, because automatic lengths depend on timings of the machine.
LOOKUP, TREE = "lookup:copy_length=5", "tree:max_nodes=8,length_policy=static@truncated:2"
# Results of a comparison: the answers or an error.
ENDED = ".hs-answers, .hs-refused"
SWITCHES = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
)
# Run the command, and log every connection to another machine.
WATCHED = """
import sys
def watch(event, given):
    if event in ("socket.connect", "socket.getaddrinfo"):
        address = given[1] if event == "socket.connect" else given
        if isinstance(address, tuple) and address[0] not in ("127.0.0.1", "localhost", "::1", None):
            print("OUTSIDE", event, address[0], file=sys.stderr, flush=True)
sys.addaudithook(watch)
from hf_spec.cli import main
main()
"""


@dataclass(frozen=True)
class Page:
    """The page in a browser."""

    browser: Any
    log: Path

    def all(self, selector: str) -> list[WebElement]:
        found: list[WebElement] = self.browser.find_elements(By.CSS_SELECTOR, selector)
        return found

    def wait(self, done: Callable[[], Any]) -> Any:
        return WebDriverWait(self.browser, LIMIT).until(lambda _: done())

    def one(self, selector: str) -> WebElement:
        found: WebElement = self.wait(lambda: self.all(selector))[0]
        return found

    def ask(self, text: str) -> None:
        """Type a prompt, press the button, and wait for an answer or an error."""
        before = self.all(ENDED)
        box = self.one("#prompt textarea")
        box.send_keys(Keys.CONTROL, "a")
        box.send_keys(Keys.DELETE, text)
        self.one("#compare").click()
        self.wait(lambda: [one for one in self.all(ENDED) if one not in before])

    def texts(self) -> list[str]:
        return [str(one.get_attribute("textContent")) for one in self.all(".hs-text")]

    @property
    def drawing(self) -> str:
        return str(self.one("#picture svg").get_attribute("outerHTML"))

    @property
    def round(self) -> int:
        """Return the number in the slider's field, counted from 1."""
        return int(str(self.one("#round input[type=number]").get_attribute("value")))

    def boxes(self, color: str = "") -> int:
        return len(self.all(f'#picture svg rect[rx="3"]{color}'))


@pytest.fixture(scope="module")
def served(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:  # noqa: F811
    """Start the page; yield its address and the log of its process."""
    log = tmp_path_factory.mktemp("ui") / "log"
    command = [sys.executable, "-c", WATCHED, "ui", str(folder)]
    command += ["--strategy", LOOKUP, "--strategy", TREE, "--port", "0"]
    command += ["--max-new-tokens", str(NEW_TOKENS), "--device", "cpu"]
    with log.open("w") as file:
        process = subprocess.Popen(command, stdout=file, stderr=file, cwd=log.parent)
    try:
        ends = time.monotonic() + LIMIT
        while not (address := re.search(r"at (http://127\.0\.0\.1:\d+/)", log.read_text())):
            assert process.poll() is None, log.read_text()
            assert time.monotonic() < ends, log.read_text()
            time.sleep(0.1)
        yield address[1], log
    finally:
        process.terminate()
        process.wait(LIMIT)


@pytest.fixture(scope="module")
def page(served: tuple[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Page]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for switch in (*SWITCHES, f"--user-data-dir={tmp_path_factory.mktemp('profile')}"):
        options.add_argument(switch)
    options.set_capability("goog:loggingPrefs", {"performance": "ALL"})
    browser = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    try:
        browser.get(served[0])
        yield Page(browser, served[1])
    finally:
        browser.quit()


@pytest.fixture(scope="module")
def answered(page: Page) -> Page:
    """Return the page after one answer was replayed to its end."""
    page.ask(PROMPT)
    page.one("#picture svg")
    page.wait(lambda: all(clock.is_displayed() for clock in page.all(".hs-clock")))
    return page


def test_both_answers_are_that_of_generate(answered: Page) -> None:
    assert answered.texts() == [plain(PROMPT, NEW_TOKENS)] * 2
    titles = [head.text for head in answered.all(".hs-answers h3")]
    assert titles == ["plain generate()", LOOKUP]


def test_accepted_drafts_are_colored(answered: Page) -> None:
    first, second = answered.all(".hs-answers section")
    assert not first.find_elements(By.CSS_SELECTOR, ".hs-drafted")
    drafted = second.find_elements(By.CSS_SELECTOR, ".hs-drafted")
    assert drafted
    color = tuple(int(ACCEPTED[i : i + 2], 16) for i in (1, 3, 5))
    for piece in drafted:
        seen = re.findall(r"[\d.]+", piece.value_of_css_property("background-color"))
        assert tuple(map(int, seen[:3])) == color


def test_figures(answered: Page) -> None:
    ratio, tau, speeds, forwards, same = (one.text for one in answered.all(".hs-figures dd"))
    assert float(ratio.removesuffix("×")) > 0
    assert float(tau) > 0
    assert all(float(speed) > 0 for speed in speeds.split(" → "))
    before, after = map(int, forwards.split(" → "))
    assert before == NEW_TOKENS > after
    assert same == "identical"


def test_the_round_is_drawn_and_chosen_with_the_slider(answered: Page) -> None:
    assert answered.boxes() >= 2
    assert answered.boxes(f'[fill="{ACCEPTED}"]') > 1
    before = answered.drawing
    field = answered.one("#round input[type=number]")
    field.send_keys(Keys.CONTROL, "a")
    field.send_keys("1", Keys.TAB)
    answered.wait(lambda: answered.drawing != before)
    assert answered.round == 1


def test_a_word_leads_to_its_round(answered: Page) -> None:
    word = answered.all(".hs-text [data-round]")[-1]
    number = int(str(word.get_attribute("data-round")))
    assert number > 0
    word.click()
    answered.wait(lambda: answered.round == number + 1)
    answered.wait(lambda: "underline" in word.value_of_css_property("text-decoration"))


def test_another_strategy(answered: Page) -> None:
    answered.one("input[aria-label=Strategy]").click()

    def choices() -> list[Any]:
        return [one for one in answered.all("[role=option]") if "truncated" in one.text]

    answered.wait(lambda: len(choices()) == 1)
    choices()[0].click()
    answered.ask(PROMPT)
    assert answered.texts() == [plain(PROMPT, NEW_TOKENS)] * 2
    assert answered.all(".hs-answers h3")[1].text == TREE


@pytest.mark.parametrize(
    ("text", "message"),
    [("", "the prompt is empty"), ("ba" * 250, "exceeds the model's context")],
)
def test_what_cannot_be_answered_is_said(answered: Page, text: str, message: str) -> None:
    answered.ask(text)
    assert message in answered.one(".hs-refused").text
    assert not answered.all(".hs-text")
    answered.ask(PROMPT)
    assert len(answered.texts()) == 2


@pytest.mark.parametrize("width", [1280, 700, 360])
def test_nothing_is_wider_than_the_window(answered: Page, width: int) -> None:
    shape = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": False}
    answered.browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", shape)
    answered.wait(lambda: answered.browser.execute_script("return window.innerWidth") == width)
    wide = "return document.documentElement.scrollWidth"
    assert answered.browser.execute_script(wide) <= width


def test_nobody_else_was_asked_for_anything(answered: Page) -> None:
    """Neither the browser nor the server connects to another machine."""
    messages = [json.loads(one["message"]) for one in answered.browser.get_log("performance")]
    sent = [one["message"] for one in messages]
    urls = [
        one["params"]["request"]["url"]
        for one in sent
        if one["method"] == "Network.requestWillBeSent"
    ]
    assert len(urls) > 3
    hosts = {urlsplit(url).hostname for url in urls if url.startswith(("http", "ws"))}
    assert hosts == {"127.0.0.1"}
    assert "OUTSIDE" not in answered.log.read_text()
    assert os.listdir(answered.log.parent) == ["log"]
