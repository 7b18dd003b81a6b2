"""The page in a real, headless Chromium: layout, sorting, filtering, colours, paper, and axe-core's rules.

They are skipped where there is no Chromium with its driver (``apt install chromium chromium-driver``) or no selenium.
axe-core comes by ``npm install --no-save axe-core``, here or in any folder that ``NODE_PATH`` names.
"""

from __future__ import annotations

import base64
import importlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.result_folders import MIB, training_layers, write_random_folder

from mucudnn.bench.results.pages.page import html_of, reports_in

webdriver = pytest.importorskip("selenium.webdriver", reason="no selenium: pip install selenium")
pytest.importorskip("jinja2")
pytest.importorskip("matplotlib")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
DRIVER = shutil.which("chromedriver")
pytestmark = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None, reason="no Chromium with its driver: apt install chromium chromium-driver"
)
PLACES = (*filter(None, os.environ.get("NODE_PATH", "").split(os.pathsep)), Path(__file__).parents[4] / "node_modules")
AXE = next((path for place in PLACES if (path := Path(place) / "axe-core" / "axe.min.js").exists()), None)
WIDTHS = (360, 768, 1440)
Browser = Any


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM
    # Tests often run as root and in small containers; the only pages that are opened are ours.
    for argument in ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("page")
    left_out = [(f"layer {number}, forward", "no time was left") for number in range(9)]
    folder = write_random_folder(
        path / "folder", training_layers(4), limits=(8 * MIB, None), rounds=5, left_out=left_out
    )
    (path / "page.html").write_text(html_of(reports_in(folder)), encoding="utf-8")
    return path / "page.html"


@pytest.fixture(scope="module")
def page_of_several(page: Path) -> Path:
    """Two result folders below one, on one page."""
    for name, layers in (("net <1>", 3), ("net 2", 1)):
        write_random_folder(page.parent / "all" / name, training_layers(layers), limits=(8 * MIB,), rounds=3)
    path = page.parent / "all.html"
    path.write_text(html_of(reports_in(page.parent / "all")), encoding="utf-8")
    return path


@pytest.fixture
def opened(browser: Browser, page: Path) -> Browser:
    return open_page(browser, page)


def open_page(browser: Browser, page: Path) -> Browser:
    resize(browser, 1440)
    emulate(browser, media="", scheme="light")
    browser.get_log("browser")
    browser.get(page.as_uri())
    wait = importlib.import_module("selenium.webdriver.support.ui").WebDriverWait(browser, 60)
    wait.until(lambda _: browser.execute_script("return document.documentElement.dataset.ready") == "yes")
    return browser


def resize(browser: Browser, width: int) -> None:
    metrics = {"width": width, "height": 800, "deviceScaleFactor": 1, "mobile": width < 600}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)


def emulate(browser: Browser, *, media: str, scheme: str) -> None:
    features = [{"name": "prefers-color-scheme", "value": scheme}]
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"media": media, "features": features})


def column(browser: Browser, table: str, title: str) -> list[str]:
    """Texts of a column's rows that are shown, from top to bottom."""
    script = """
        const section = document.getElementById(arguments[0]).closest('section');
        const titles = [...section.querySelectorAll('.titles th')].map((each) => each.textContent);
        const shown = [...section.querySelectorAll('tbody tr')].filter((row) => !row.hidden);
        return shown.map((row) => row.cells[titles.indexOf(arguments[1])].textContent);"""
    texts: list[str] = browser.execute_script(script, table, title)
    return texts


def press(browser: Browser, table: str, title: str) -> str:
    """Press the button of a column; returns how it says that it is sorted."""
    script = """
        const section = document.getElementById(arguments[0]).closest('section');
        const title = [...section.querySelectorAll('.titles th')].find((each) => each.textContent === arguments[1]);
        title.querySelector('button').click();
        return title.getAttribute('aria-sort');"""
    return str(browser.execute_script(script, table, title))


def numbers(texts: list[str]) -> list[float]:
    return [float(text) for text in texts if text]


def test_only_boxes_scroll_sideways_and_the_console_is_empty(opened: Browser) -> None:
    beyond = """
        const every = [...document.querySelectorAll('h1, h2, p, dl, summary, form, figcaption, .box, section, figure')];
        const wide = (each) => each.getBoundingClientRect().right > innerWidth;
        const clipped = (each) => !each.matches('.box') && each.scrollWidth > each.clientWidth;
        return every.filter((each) => wide(each) || clipped(each)).map((each) => each.outerHTML.slice(0, 200));"""
    for width in WIDTHS:
        resize(opened, width)
        assert opened.execute_script("return document.documentElement.scrollWidth") <= width
        assert opened.execute_script(beyond) == []
    assert opened.get_log("browser") == []


def test_columns_are_sorted_in_both_directions(opened: Browser) -> None:
    before = numbers(column(opened, "operations", "median, ms"))
    assert before != sorted(before)
    assert press(opened, "operations", "median, ms") == "ascending"
    assert numbers(column(opened, "operations", "median, ms")) == sorted(before)
    assert press(opened, "operations", "median, ms") == "descending"
    assert numbers(column(opened, "operations", "median, ms")) == sorted(before, reverse=True)
    for _ in range(2):  # rows without a value stay last
        press(opened, "operations", "speedup over PyTorch")
        texts = column(opened, "operations", "speedup over PyTorch")
        filled = [text for text in texts if text]
        assert 0 < len(filled) < len(texts)
        assert texts[: len(filled)] == filled


def test_rows_are_filtered_by_words_and_choices(opened: Browser) -> None:
    every = column(opened, "operations", "operation")
    form = opened.find_element("css selector", "#operations ~ form")
    form.find_element("css selector", "input").send_keys("MUCUDNN data")
    assert set(column(opened, "operations", "operation")) == {"backward_data"}
    assert set(column(opened, "operations", "contestant")) == {"mucudnn"}
    told = form.find_element("css selector", "output").text
    assert told == f"{len(column(opened, 'operations', 'operation'))} of {len(every)} rows"
    form.find_element("css selector", "input").clear()
    form.find_element("css selector", "input").send_keys(" ")
    pick = "const s = arguments[0]; s.value = arguments[1]; s.dispatchEvent(new Event('input', {bubbles: true}))"
    (contestants,) = [
        s for s in form.find_elements("tag name", "select") if "undivided" in s.text and "torch" in s.text
    ]
    opened.execute_script(pick, contestants, "torch")
    assert set(column(opened, "operations", "contestant")) == {"torch"}
    opened.execute_script(pick, contestants, "")
    assert column(opened, "operations", "operation") == every


def test_paper_has_all_rows_and_no_controls(opened: Browser) -> None:
    emulate(opened, media="print", scheme="dark")
    opened.execute_script("window.dispatchEvent(new Event('beforeprint'))")
    shown = "return [...document.querySelectorAll(arguments[0])].filter((e) => e.checkVisibility()).length"
    assert opened.execute_script(shown, ".filters, nav") == 0
    assert opened.execute_script(shown, "details:not([open])") == 0
    clipped = "return [...document.querySelectorAll('.box')].filter((b) => b.scrollHeight > b.clientHeight + 1).length"
    assert opened.execute_script(clipped) == 0
    assert opened.execute_script("return getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)"
    printed = base64.b64decode(opened.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True})["data"])
    assert printed.startswith(b"%PDF")


@pytest.mark.skipif(AXE is None, reason="no axe-core: npm install --no-save axe-core")
def test_axe_finds_no_violation(browser: Browser, page: Path, page_of_several: Path) -> None:
    for one in (page, page_of_several):
        for scheme, width in (("light", 1440), ("dark", 360)):
            opened = open_page(browser, one)
            resize(opened, width)
            emulate(opened, media="", scheme=scheme)
            require_accessible(opened)


def require_accessible(opened: Browser) -> None:
    assert AXE is not None
    opened.execute_script(AXE.read_text(encoding="utf-8"))
    found = opened.execute_async_script("axe.run().then(arguments[arguments.length - 1])")
    violations = [(each["id"], [node["html"] for node in each["nodes"]][:3]) for each in found["violations"]]
    assert violations == []
    assert found["passes"]


def test_each_of_several_folders_sorts_its_own(browser: Browser, page_of_several: Path) -> None:
    opened = open_page(browser, page_of_several)
    before = [numbers(column(opened, f"folder-{number}-operations", "median, ms")) for number in (1, 2)]
    assert press(opened, "folder-1-operations", "median, ms") == "ascending"
    after = [numbers(column(opened, f"folder-{number}-operations", "median, ms")) for number in (1, 2)]
    assert after == [sorted(before[0]), before[1]]
    resize(opened, WIDTHS[0])
    assert opened.execute_script("return document.documentElement.scrollWidth") <= WIDTHS[0]
    assert opened.get_log("browser") == []
