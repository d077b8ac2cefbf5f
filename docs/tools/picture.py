"""Draw the pictures of the inspector that README and home page show, in the light and the dark
theme, with a Chromium on the PATH:

    python -m docs.tools.picture
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import torch
from playwright.sync_api import sync_playwright

import thunder_fn as tfn
from tests.conftest import find_chromium
from thunder_fn.benchmarks.models import GPT, gpt_loss, params_of
from thunder_fn.inspect import Machine, Page

DOCS = Path(__file__).parents[1]
PICTURES = {"light": DOCS / "inspector.png", "dark": DOCS / "inspector-dark.png"}
FOLLOWED = "step=1&at=6.1&var=v133.1"
"""The gradient of the logits, in the second step."""
LAPTOP = Machine("a laptop core", 1e11, 12e9)


def page() -> Page:
    """The page of a train step of a small GPT."""
    torch.manual_seed(0)
    model = GPT(4)
    loss, params = gpt_loss(model), params_of(model)
    optimizer = tfn.functional_optimizer(torch.optim.SGD, lr=0.1)

    def train_step(params: Any, state: Any, tokens: Any, targets: Any) -> Any:
        return optimizer.update(params, tfn.grad(loss)(params, tokens, targets), state)

    tokens = torch.randint(96, (8, 64))
    state = optimizer.init(params)
    show = lambda: tfn.inspect.show(train_step, params, state, tokens, tokens, machine=LAPTOP)
    show()  # so that the times are those of a process that has derived the rules of ops before
    return show()


def draw(html: Path, scheme: Any, path: Path) -> None:
    """Photograph the page where one value is followed."""
    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=find_chromium(), args=["--no-sandbox"]
        )
        tab = chromium.new_page(
            viewport={"width": 1440, "height": 900}, color_scheme=scheme, bypass_csp=True
        )
        tab.set_default_timeout(60_000)
        tab.goto(f"{html.as_uri()}#{FOLLOWED}")
        tab.wait_for_selector(".row.selected")
        tab.screenshot(path=str(path))
        chromium.close()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        made = page().save(f"{folder}/page.html")
        for scheme, path in PICTURES.items():
            draw(made, scheme, path)
