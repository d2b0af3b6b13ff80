import pytest

from coordinator.api.routes import ROUTES
from coordinator.stateful.routes import ROUTES as STATEFUL
from pdserve.shared.hints.urls import check_url, path_instead

KNOWN = {route.path for route in (*ROUTES, *STATEFUL)}
HERE = "http://127.0.0.1:8000"


@pytest.mark.parametrize("prefix", ["", "/v1/v1", "/openai/v1", "/api/v1", "/openai", "//v1"])
@pytest.mark.parametrize("path", sorted(path for path in KNOWN if path.startswith("/v1/")))
def test_a_base_url_that_is_wrong_is_told_with_the_right_one(prefix, path):
    asked = path.replace("/v1", prefix, 1)
    if asked in KNOWN:
        return
    assert path_instead(asked, KNOWN, HERE).startswith(
        f"it is {HERE}{path}: the base URL of clients is {HERE}/v1"
    )


@pytest.mark.parametrize(
    ("asked", "meant"),
    [
        ("/api/tags", "/v1/models"),
        ("/api/chat", "/v1/chat/completions"),
        ("/api/generate", "/v1/completions"),
        ("/api/version", "/version"),
        ("/generate/", "/v1/completions"),
        ("/healthz", "/health"),
    ],
)
def test_a_path_of_another_server_is_told_with_what_to_use(asked, meant):
    assert meant in KNOWN
    told = f"use {HERE}{meant}; clients of OpenAI's API have the base URL {HERE}/v1"
    assert path_instead(asked, KNOWN, HERE) == told


@pytest.mark.parametrize("path", ["/", "/xyz", "/v1", "/favicon.ico", "/.env"])
def test_any_other_path_is_told_with_where_all_are(path):
    assert path_instead(path, KNOWN, HERE).startswith(f"{HERE}/docs lists all")


@pytest.mark.parametrize(
    ("text", "right"),
    [
        ("127.0.0.1:8000", "http://127.0.0.1:8000"),
        ("localhost", "http://localhost"),
        ("//a:1", "http://a:1"),
        ("ftp://a:1/", "http://a:1"),
        ("http:/a", "http://a"),
        ("", HERE),
        ("http://a:1/v1", "http://a:1"),
        ("https://a/proxy/v1/", "https://a/proxy"),
    ],
)
def test_what_is_no_address_of_a_server_is_told_with_one(text, right):
    with pytest.raises(ValueError, match="write") as info:
        check_url(text)
    assert f'"{right}"' in str(info.value)
    assert check_url(right) == right
