"""Make the pictures of the dashboard in docs/images: `python docs/screenshots.py [FOLDER]`.

They show the made-up laboratory of the tests, in the browser of the tests.
"""

from __future__ import annotations

import base64
import shutil
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from playwright.sync_api import expect  # noqa: E402
from tests.dashboard.browser import DESKTOP, PHONE, chromium, visiting  # noqa: E402
from tests.dashboard.sample import KEY, Laboratory, served  # noqa: E402

MOST_BYTES = 150_000
TALL = {**DESKTOP, "height": 1180}
SHOTS = (
    ("overview-light", "", "light", TALL),
    ("overview-dark", "", "dark", TALL),
    ("jobs-light", "jobs", "light", TALL),
    ("connect-dark", "connect", "dark", DESKTOP),
    ("phone-light", "", "light", PHONE),
    ("phone-jobs-dark", "jobs", "dark", PHONE),
)


def main(folder: Path) -> None:
    """Take every picture."""
    program = shutil.which("chromium")
    if program is None:
        raise SystemExit("Chromium is missing: apt-get install chromium")
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as scratch,
        served(Laboratory(), Path(scratch)) as url,
        chromium(program) as browser,
    ):
        for name, view, colours, size in SHOTS:
            options = {"viewport": size, "color_scheme": colours, "reduced_motion": "reduce"}
            with visiting(browser, f"{url}/#/{view}", key=KEY, **options) as page:
                expect(page.get_by_role("status").filter(has_text="Live")).to_be_visible()
                if view == "jobs":
                    page.get_by_role("button", name="Timeline").nth(2).click()
                    expect(page.locator(".timeline")).to_be_visible()
                page.evaluate("document.fonts.ready")
                # Playwright itself has no WebP.
                shot = page.context.new_cdp_session(page).send(
                    "Page.captureScreenshot",
                    {"format": "webp", "quality": 82},
                )
                file = folder / f"{name}.webp"
                file.write_bytes(base64.b64decode(shot["data"]))
            if file.stat().st_size > MOST_BYTES:
                raise SystemExit(
                    f"{file} has {file.stat().st_size:,} bytes, more than {MOST_BYTES:,}."
                )


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else ROOT / "docs" / "images")
