"""The page in a real browser: every view end to end, with a real release and a real ledger; and hostile requests.

The screenshots of the documentation are made here: MATRIXDP_SCREENSHOTS=docs python -m pytest tests/explorer
"""

import csv
import io
import os
import re
import shutil
import sqlite3
import subprocess
import sys
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
from websockets.exceptions import InvalidStatus
from websockets.sync.client import connect

import hospital
from matrixdp import Budget, Ledger
from matrixdp.explorer import server

CHROMIUM = shutil.which("chromium")
SCREENSHOTS = os.environ.get("MATRIXDP_SCREENSHOTS")
WAIT = 60_000  # milliseconds; numba may compile first

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(CHROMIUM is None, reason="there is no chromium: apt-get install chromium"),
]


@pytest.fixture(scope="module")
def home(tmp_path_factory):
    """A folder with a made hospital, its domain and ledgers."""
    folder = tmp_path_factory.mktemp("explore")
    hospital.hospital(2000).to_csv(folder / "patients.csv", index=False)
    (folder / "domain.toml").write_text(hospital.domain(missing="out").to_toml())
    (folder / "small.toml").write_text(
        '[columns.sex]\nkind = "categorical"\nvalues = ["f", "m"]\n'
        '[columns.region]\nkind = "categorical"\nvalues = ["north", "south"]\n'
    )
    for name, epsilon in (("budget.db", 3.0), ("tabs.db", 1.0), ("reload.db", 1.0), ("long.db", 1.0)):
        Ledger(folder / name, Budget(epsilon, 1e-6))
    return folder


@pytest.fixture(scope="module")
def address(home):
    """The address of a running page."""
    program = "from matrixdp.cli import main; main()"
    given = ["--records", "patients.csv", "--domain", "domain.toml", "--ledger", "budget.db"]
    running = subprocess.Popen(
        [sys.executable, "-c", program, "explore", "--no-browser", *given],
        cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        yield running.stdout.readline().strip()
    finally:
        running.terminate()
        _, said = running.communicate(timeout=120)
    # Shiny may say that timers of open pages were cancelled when the program ended
    assert said.count("Traceback") == said.count("CancelledError"), said


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        found = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield found
        found.close()


@pytest.fixture
def requests():
    return []


@pytest.fixture
def page(browser, address, requests):
    """A tab that was opened by the address with the token; where its requests went is kept."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    tab = opened(context, address, requests)
    yield tab
    context.close()


def opened(context, address, requests=None):
    tab = context.new_page()
    problems = []
    tab.on("pageerror", lambda problem: problems.append(str(problem)))
    if requests is not None:
        tab.on("request", lambda request: requests.append(request.url))
        tab.on("websocket", lambda socket: requests.append(socket.url))
    tab.goto(address)
    tab.wait_for_selector("#compare_table table", timeout=WAIT)
    assert problems == []
    return tab


def go(tab, name):
    tab.get_by_role("tab", name=name).click()


def shot(tab, name):
    """A picture for the documentation, or for whoever asks for more by MATRIXDP_SCREENSHOTS."""
    if SCREENSHOTS:
        tab.mouse.move(0, 0)
        tab.wait_for_timeout(400)
        tab.screenshot(path=Path(SCREENSHOTS, f"explore-{name}.png"), full_page=True)


def preview(tab, statistic="counts by region", epsilon="0.5", **fields):
    go(tab, "Release")
    for name, text in {"statistic": statistic, "epsilon": epsilon, **fields}.items():
        tab.fill(f"#release_{name}", text)
    tab.click("#release_preview")
    tab.wait_for_selector("#release_confirm", timeout=WAIT)


# --- the views ---


def test_compare(page, requests):
    page.wait_for_selector("#compare_claim :text('The claim is false here.')", timeout=WAIT)
    page.wait_for_selector("#compare_bar progress", state="detached", timeout=WAIT)
    assert page.locator("#compare_curves svg path.curve").count() >= 4
    shot(page, "compare")
    before = page.locator("#compare_table").inner_text()
    page.focus("#compare_epsilon")
    page.keyboard.press("ArrowRight")
    assert page.get_attribute("#compare_epsilon", "aria-valuetext") == "1.5"
    page.wait_for_function("before => document.querySelector('#compare_table').innerText !== before", arg=before)
    assert "Budget(1.5, 1e-06)" in page.inner_text("#compare_python")
    assert "--epsilon 1.5 --delta 1e-06" in page.inner_text("#compare_command")
    host = re.match(r"http://([^/]+)/", page.url)[1]
    assert requests
    assert {re.match(r"\w+://([^/]+)/", url)[1] for url in requests} == {host}
    assert host.startswith("127.0.0.1:")


def test_plan(page):
    go(page, "Plan")
    page.fill("#plan_statistics", "counts by region, age\nweight 2: counts by sex")
    page.click("#plan_start")
    page.wait_for_selector("#plan_table tbody tr", timeout=WAIT)
    assert page.locator("#plan_table tbody tr").count() == 2
    assert "± " in page.inner_text("#plan_table")
    assert "matrixdp ledger plan" in page.inner_text("#plan_command")
    shot(page, "plan")
    page.fill("#plan_statistics", "counts by nothing")
    page.click("#plan_start")
    page.wait_for_selector("#plan_alert [role=alert]", timeout=WAIT)
    assert "no column 'nothing'" in page.inner_text("#plan_alert")
    assert "Traceback" not in page.content()


def test_a_domain_can_be_uploaded(page, home):
    go(page, "Plan")
    page.click("#plan_domain >> xpath=../following-sibling::details/summary")
    page.set_input_files("#plan_upload", home / "small.toml")
    page.wait_for_selector("#plan_columns :text('region (4 labels)')", timeout=WAIT)
    page.fill("#plan_statistics", "counts by sex")
    page.click("#plan_start")
    page.wait_for_selector("#plan_table tbody tr", timeout=WAIT)
    assert "small.toml" in page.inner_text("#plan_command")


def test_release_and_ledger(page, home, tmp_path):
    preview(page, analyst="ada", purpose="annual report", unit="patient_id", contributions="2")
    assert page.evaluate("document.activeElement.id") == "release_preview_title"
    text = page.inner_text("#release_shown")
    assert "from epsilon 0 to 0.5" in text
    assert Ledger(home / "budget.db").history() == []
    shot(page, "release")
    page.dblclick("#release_confirm")
    page.wait_for_selector("#release_list table", timeout=WAIT)
    (entry,) = Ledger(home / "budget.db").history()
    assert (entry.analyst, entry.purpose, entry.unit) == ("ada", "annual report", "patient_id")
    shot(page, "released")
    for link in page.locator("#release_list a[download]").all():
        with page.expect_download() as download:
            link.click()
        download.value.save_as(tmp_path / link.inner_text())
    released = list(csv.DictReader(io.StringIO((tmp_path / "table.csv").read_text())))
    assert [row["region"] for row in released] == [*hospital.REGIONS, "other"]
    program = "from matrixdp.cli import main; main()"
    words = ["verify", "table.certificate.json", "--value", "table.csv"]
    done = subprocess.run([sys.executable, "-c", program, *words], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert "What is guaranteed" in (tmp_path / "statement.html").read_text()

    go(page, "Ledger")
    page.click("#ledger_open")
    page.wait_for_selector("#ledger_history tbody tr", timeout=WAIT)
    assert Ledger(home / "budget.db").verify() in page.inner_text("#ledger_left")
    assert "ada" in page.inner_text("#ledger_history")
    shot(page, "ledger")


def test_the_source_of_the_page_holds_no_record(page, home):
    preview(page, ledger="tabs.db")
    cells = {line.split(",")[0] for line in (home / "patients.csv").read_text().splitlines()[1:]} - {""}
    assert len(cells) > 1000
    content = page.content()
    assert not [cell for cell in cells if cell in content]


def test_the_page_opens_by_a_file_that_only_its_owner_can_read(browser, address, monkeypatch):
    """So the token is in no argument of a program; and the cookie comes along, though the file is another site."""
    opened_by = []
    monkeypatch.setattr("webbrowser.open", opened_by.append)
    context = browser.new_context()
    with ExitStack() as stack:
        server._open(address, stack)
        (file,) = opened_by
        path = Path(file.removeprefix("file://"))
        assert path.parent.stat().st_mode & 0o077 == 0
        tab = context.new_page()
        tab.goto(file)
        tab.wait_for_selector("#compare_table table", timeout=WAIT)
    assert not path.exists()
    assert "token" not in tab.url
    context.close()


# --- several tabs, reloads ---


def test_two_tabs_that_spend_at_once_cannot_overspend(browser, address, home):
    context = browser.new_context()
    tabs = [opened(context, address) for _ in range(2)]
    for tab in tabs:
        preview(tab, epsilon="0.8", ledger="tabs.db")
    for tab in tabs:
        tab.click("#release_confirm", no_wait_after=True)
    for tab in tabs:
        tab.wait_for_function(
            "() => /Released: counts by region, epsilon 0.8/.test(document.querySelector('#release_list').innerText)"
            " && /Not released: counts by region, epsilon 0.8/.test(document.querySelector('#release_list').innerText)",
            timeout=WAIT,
        )
        assert "nothing was spent" in tab.inner_text("#release_list")
    assert len(Ledger(home / "tabs.db").history()) == 1
    context.close()


@contextmanager
def busy(ledger):
    """Another program is writing to the ledger: a release waits for it, in the middle."""
    other = sqlite3.connect(ledger, isolation_level=None)
    other.execute("BEGIN IMMEDIATE")
    try:
        yield
    finally:
        other.execute("ROLLBACK")
        other.close()


def test_a_reload_in_mid_release_charges_once_and_keeps_the_release(page, home):
    preview(page, ledger="reload.db")
    with busy(home / "reload.db"):
        page.click("#release_confirm")
        page.wait_for_selector("#release_list h2:has-text('Releasing: counts by region')", timeout=WAIT)
        page.reload()
        go(page, "Release")
        page.wait_for_selector("#release_list h2:has-text('Releasing: counts by region')", timeout=WAIT)
        assert page.locator("#release_confirm").count() == 0
    page.wait_for_selector("#release_list h2:has-text('Released: counts by region')", timeout=WAIT)
    assert "north" in page.inner_text("#release_list table")
    assert len(Ledger(home / "reload.db").history()) == 1


def test_a_long_release_blocks_no_other_view(page, home):
    preview(page, epsilon="0.25", ledger="long.db")
    with busy(home / "long.db"):
        page.click("#release_confirm")
        page.wait_for_selector("#release_list h2:has-text('Releasing')", timeout=WAIT)
        go(page, "Plan")
        page.fill("#plan_statistics", "counts by sex")
        page.click("#plan_start")
        page.wait_for_selector("#plan_table tbody tr", timeout=WAIT)
        go(page, "Release")
        assert page.locator("#release_list h2:has-text('Releasing')").count() == 1
    page.wait_for_selector("#release_list h2:has-text('Released: counts by region, epsilon 0.25')", timeout=WAIT)


# --- who may talk to it ---


def answer(url, **headers):
    try:
        with urllib.request.urlopen(urllib.request.Request(url, headers=headers), timeout=60) as found:
            return found.status
    except urllib.error.HTTPError as refused:
        return refused.code


def test_a_hostile_request_is_refused(page, address):
    root = re.match(r"http://[^/]+", address)[0]
    cookie = "; ".join(f"{each['name']}={each['value']}" for each in page.context.cookies(page.url))
    assert answer(page.url, Cookie=cookie) == 200
    assert answer(root) == 403
    assert answer(f"{root}/?token=wrong") == 403
    assert answer(page.url) == 403
    assert answer(page.url, Cookie=cookie, Host="evil.example") == 403
    assert answer(address, Host="evil.example") == 403
    assert answer(page.url, Cookie=cookie, Origin="http://evil.example") == 403
    (kept,) = page.context.cookies(page.url)
    assert kept["httpOnly"]
    assert kept["sameSite"] == "Strict"
    assert kept["path"] != "/"


def test_a_websocket_without_cookie_or_from_elsewhere_is_refused(page):
    socket = page.url.replace("http://", "ws://") + "websocket/"
    origin = re.match(r"http://[^/]+", page.url)[0]
    cookie = "; ".join(f"{each['name']}={each['value']}" for each in page.context.cookies(page.url))
    with connect(socket, additional_headers={"Cookie": cookie, "Origin": origin}, proxy=None):
        pass
    for headers in ({"Origin": origin}, {"Cookie": cookie}, {"Cookie": cookie, "Origin": "http://evil.example"}):
        with pytest.raises(InvalidStatus, match="403"):
            connect(socket, additional_headers=headers, proxy=None)


# --- for everybody ---


def test_everything_has_a_name_and_can_be_reached_by_keyboard(page):
    nameless = page.evaluate(
        """() => [...document.querySelectorAll('input, select, textarea, button, a[href]')].filter(each =>
            !(each.labels && each.labels.length) && !each.getAttribute('aria-label') && !each.title
            && !each.innerText.trim() && each.type !== 'hidden' && !each.closest('bslib-input-dark-mode')
            && getComputedStyle(each).display !== 'none').map(each => each.outerHTML.slice(0, 120))"""
    )
    assert nameless == []
    assert page.evaluate("document.documentElement.lang") == "en"
    for name in ("Compare", "Plan", "Release", "Ledger"):
        go(page, name)
        assert page.locator("h1:visible").count() == 1
    page.get_by_role("tab", name="Ledger").focus()
    page.keyboard.press("ArrowLeft")
    assert page.locator("h1:visible").inner_text() == "Release"
    assert page.locator("[role=status][aria-live=polite]").count() >= 4


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 800])
def test_it_follows_the_scheme_and_fits_the_width(browser, address, scheme, width):
    context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
    tab = opened(context, address)
    ground = tab.evaluate("getComputedStyle(document.body).backgroundColor")
    brightness = sum(map(int, re.findall(r"\d+", ground)[:3]))
    assert (brightness < 150) == (scheme == "dark")
    for name in ("Compare", "Plan", "Release", "Ledger"):
        go(tab, name)
        assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    if scheme == "dark" and width == 1280:
        go(tab, "Compare")
        tab.wait_for_selector("#compare_bar progress", state="detached", timeout=WAIT)
        shot(tab, "dark")
    context.close()


def test_the_program_ends_when_it_is_interrupted(home):
    running = subprocess.Popen(
        [sys.executable, "-c", "from matrixdp.cli import main; main()", "explore", "--no-browser"],
        cwd=home, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert running.stdout.readline().startswith("http://127.0.0.1:")
    time.sleep(0.5)
    running.send_signal(2)
    _, said = running.communicate(timeout=120)
    assert "Traceback" not in said
