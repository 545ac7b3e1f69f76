"""Settings choose the form of `ObjectStore`."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from pydantic import ValidationError

from ndif.config.reference import variables
from ndif.config.settings import Settings
from ndif.stores.objects import FileStore, ObjectStoreError, open_store

S3 = {
    "NDIF_OBJECT_STORE_URL": "http://store:9000/",
    "NDIF_OBJECT_STORE_ACCESS_KEY": "key",
    "NDIF_OBJECT_STORE_SECRET_KEY": "hush",
}


def settings(monkeypatch: pytest.MonkeyPatch, **environment: str) -> Settings:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    return Settings()


def test_file_store_is_default(tmp_path: Path) -> None:
    store = open_store(Settings(), tmp_path)
    assert isinstance(store, FileStore)
    assert store.root == tmp_path.resolve()


def test_missing_s3_library_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("obstore", "ndif.stores.objects.s3"):
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(ObjectStoreError, match=r"pip install 'obstore>=0\.12'`$"):
        open_store(settings(monkeypatch, **S3), tmp_path)


def test_store_url_selects_s3_bucket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = open_store(settings(monkeypatch, **S3), tmp_path)
    assert store.url("results/x.pt", "http://us").startswith("http://store:9000/ndif/results/x.pt?")


def test_result_urls_use_public_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = {
        "NDIF_OBJECT_STORE_PUBLIC_URL": "https://results.example.org",
        "NDIF_OBJECT_STORE_BUCKET": "bucket",
        "NDIF_OBJECT_STORE_REGION": "eu-north-1",
        "NDIF_OBJECT_STORE_VERIFY": "false",
        "NDIF_RESULT_TTL_S": "60",
    }
    url = open_store(settings(monkeypatch, **S3, **more), tmp_path).url("results/x.pt", "")
    assert url.startswith("https://results.example.org/bucket/results/x.pt?")
    assert "eu-north-1" in url
    assert "X-Amz-Expires=60&" in url


@pytest.mark.parametrize(
    ("value", "verify"), [("true", True), ("false", False), ("0", False), ("{file}", Path)]
)
def test_verify_setting_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, value: str, verify: object
) -> None:
    file = tmp_path / "authorities.pem"
    file.write_text("")
    options = settings(
        monkeypatch, NDIF_OBJECT_STORE_VERIFY=value.format(file=file)
    ).object_store_verify
    assert options == (file if verify is Path else verify)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({"NDIF_OBJECT_STORE_URL": "http://store:9000"}, "needs NDIF_OBJECT_STORE_ACCESS_KEY"),
        ({**S3, "NDIF_OBJECT_STORE_SECRET_KEY": ""}, "needs NDIF_OBJECT_STORE_ACCESS_KEY"),
        ({**S3, "NDIF_OBJECT_STORE_URL": "store:9000"}, "is not like http://host:port"),
        ({**S3, "NDIF_OBJECT_STORE_URL": "s3://bucket"}, "is not like http://host:port"),
        ({**S3, "NDIF_OBJECT_STORE_PUBLIC_URL": "https://"}, "is not like http://host:port"),
        ({**S3, "NDIF_OBJECT_STORE_URL": "http://a:b@store"}, "must not contain keys"),
        ({**S3, "NDIF_OBJECT_STORE_VERIFY": "/no/such/file"}, "does not point to a file"),
    ],
)
def test_invalid_store_settings_are_refused(
    monkeypatch: pytest.MonkeyPatch, environment: dict[str, str], expected: str
) -> None:
    with pytest.raises(ValidationError, match=expected):
        settings(monkeypatch, **environment)


def test_store_secret_is_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = {variable.name: variable.value for variable in variables(settings(monkeypatch, **S3))}
    assert shown["NDIF_OBJECT_STORE_ACCESS_KEY"] == "key"
    assert "hush" not in str(shown)
