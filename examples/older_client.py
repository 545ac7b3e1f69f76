"""A trace by nnsight 0.7 on the same server; run it with an interpreter that has that version.

NDIF_HOST=http://HOST:PORT [HF_ENDPOINT=http://HOST:PORT/hub]
"""

from __future__ import annotations

import argparse

import nnsight
from nnsight import CONFIG, LanguageModel


def main() -> None:
    """Run one trace and print the predicted token."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("name", help="the model's name on the server")
    name = parser.parse_args().name
    CONFIG.APP.REMOTE_LOGGING = False
    model = LanguageModel(name)
    with model.trace("The Eiffel Tower is in the city of", remote=True):
        token = model.lm_head.output[0, -1].argmax().save()
    print(f"nnsight {nnsight.__version__} gets the token {model.tokenizer.decode(token)!r}, too.")


if __name__ == "__main__":
    main()
