"""The pages at /, in a real browser."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import tiny_llama
from peft import LoraConfig, get_peft_model
from playwright.sync_api import Page, expect, sync_playwright
from test_server import _Running

from headrace.serve import Engine, SamplingParams
from headrace.serve.api import ServerOptions

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"]
FLAGS += ["--disable-background-networking", "--disable-component-update", "--disable-sync"]


@pytest.fixture(scope="module")
def page() -> Iterator[Page]:
    """A page of a fresh browser that reaches this machine only."""
    if CHROMIUM is None:
        pytest.skip("no Chromium is installed")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        opened = browser.new_page(viewport={"width": 1100, "height": 640})
        opened.set_default_timeout(60_000)
        expect.set_options(timeout=60_000)
        yield opened
        browser.close()


@pytest.fixture(scope="module")
def server(engine: Engine, tmp_path_factory: pytest.TempPathFactory) -> Iterator[_Running]:
    """The shared engine with an adapter; the page shows base and tuned side by side."""
    tuned: Any = get_peft_model(tiny_llama(), LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    folder = tmp_path_factory.mktemp("adapters") / "tuned"
    with torch.no_grad():
        for name, parameter in tuned.named_parameters():
            if "lora_B" in name:
                parameter.copy_(torch.randn_like(parameter))
    tuned.save_pretrained(str(folder))
    engine.load_adapter("tuned", folder)
    running = _Running(engine, ServerOptions())
    yield running
    running.stop()
    engine.unload_adapter("tuned")


def test_the_playground_streams_two_answers_side_by_side(
    page: Page, server: _Running, engine: Engine, tmp_path: Path
) -> None:
    problems: list[str] = []
    asked: list[str] = []

    page.on("request", lambda request: asked.append(request.url))
    page.on("pageerror", lambda error: problems.append(str(error)))
    params = SamplingParams(temperature=0, max_tokens=12)
    conversation = "user: call Tom\nassistant: "
    wanted = [
        engine.generate([conversation], params, adapter=adapter)[0][0].text
        for adapter in (None, "tuned")
    ]
    page.goto(server.url)
    expect(page.locator("section .model").nth(0)).to_have_value("tiny")
    expect(page.locator("section .model").nth(1)).to_have_value("tuned")
    page.fill("#max_tokens", "12")
    page.fill("#text", "call Tom")
    page.press("#text", "Enter")
    for i in range(2):
        numbers = page.locator("section .numbers").nth(i)
        expect(numbers).to_contain_text("12 tokens")
        expect(numbers).to_contain_text("first after")
    shown = [page.locator("section").nth(i).locator(".assistant").text_content() for i in range(2)]
    assert shown == wanted
    page.screenshot(path=str(tmp_path / "page.png"))
    assert problems == []
    assert all(url.startswith((server.url, "data:")) for url in asked)


def test_the_playground_stops_continues_and_reports(page: Page, server: _Running) -> None:
    page.goto(server.url)
    expect(page.locator("section .model").nth(0)).to_have_value("tiny")
    page.uncheck("#two")
    expect(page.locator("section").nth(1)).to_be_hidden()
    page.select_option("#mode", "completion")
    page.fill("#max_tokens", "9000")
    page.fill("#text", "call Tom")
    page.click("#send")
    expect(page.locator("section .numbers").nth(0)).to_have_text("failed")
    expect(page.locator(".failed")).to_contain_text("context is 160 tokens")
    page.click("#clear")
    expect(page.locator(".turn")).to_have_count(0)
    page.fill("#max_tokens", "20")
    page.fill("#stop", "\\n\\n\\n")
    page.click("#send")
    expect(page.locator("section .numbers").nth(0)).to_contain_text("tokens ·")
    expect(page.locator("#send")).to_be_enabled()
