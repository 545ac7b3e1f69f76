"""What obstore says when it fails, as a sentence for who runs the server."""

from __future__ import annotations

import re

_CODE = re.compile(r"<Code>([^<]+)</Code>")
_MESSAGE = re.compile(r"<Message>([^<]+)</Message>")
_STATUS = re.compile(r"status code: (\d{3} [A-Za-z ]*[A-Za-z])")
_CAUSE = re.compile(r'(?:message|error): "([^"]+)"')
_CERTIFICATE = re.compile(r"InvalidCertificate\(\s*(\w+)")
_BY_KIND = {
    "TimedOut": "it does not answer in time",
    "IncompleteMessage": "it closed the connection",
    "ConnectionReset": "it closed the connection",
}
_OF_KEYS = frozenset({"SignatureDoesNotMatch", "InvalidAccessKeyId", "AccessDenied"})
_TRUST = "see NDIF_OBJECT_STORE_VERIFY"
_ADVICE = "; see NDIF_OBJECT_STORE_ACCESS_KEY and NDIF_OBJECT_STORE_SECRET_KEY"


def no_bucket(error: Exception) -> bool:
    """Whether the server says that the bucket is not there."""
    found = _CODE.search(str(error))
    return found is not None and found[1] == "NoSuchBucket"


def answered(url: str, status: str, body: str) -> str:
    """The sentence for an answer that is a refusal."""
    code = _CODE.search(body)
    if code is None:
        return f"the object store at {url} answers {status}"
    message = _MESSAGE.search(body)
    words = f": {message[1].rstrip('.')}" if message is not None else ""
    advice = _ADVICE if code[1] in _OF_KEYS else ""
    return f"the object store at {url} refuses ({code[1]}{words}){advice}"


def sentence(url: str, error: Exception) -> str:
    """What went wrong at the store."""
    text = str(error)
    if status := _STATUS.search(text):
        return answered(url, status[1], text)
    # The innermost cause comes last in what obstore shows of its source.
    causes = _CAUSE.findall(text)
    if certificate := _CERTIFICATE.search(text):
        causes.append(f"its certificate is not trusted ({certificate[1]}); {_TRUST}")
    causes += [words for kind, words in _BY_KIND.items() if kind in text]
    cause = causes[-1] if causes else text.partition("\n")[0]
    return f"the object store at {url} cannot be reached: {cause}"
