"""Who may talk to the page: no request without the token or the cookie, under another name, or from another site."""

import asyncio

import pytest

from matrixdp.explorer.access import COOKIE, Access

PORT = 4711
HOST = f"127.0.0.1:{PORT}"
SEEN = []


async def inner(scope, receive, send):
    SEEN.append(scope["path"])
    if scope["type"] == "websocket":
        await send({"type": "websocket.accept"})
    else:
        headers = [(b"content-security-policy", b"default-src *"), (b"x-own", b"1")]
        await send({"type": "http.response.start", "status": 200, "headers": headers})
        await send({"type": "http.response.body", "body": b"the page"})


@pytest.fixture
def access():
    SEEN.clear()
    return Access(inner, PORT)


def ask(access, path="/", query="", *, kind="http", method="GET", host=HOST, **headers):
    """The messages that answer a request; a header may be given several times as a list."""
    sent = []
    given = [("host", host)] if isinstance(host, str) else [("host", each) for each in host]
    given += [
        (name, each) for name, value in headers.items() for each in ([value] if isinstance(value, str) else value)
    ]
    scope = {
        "type": kind, "path": path, "raw_path": path.encode(), "query_string": query.encode(), "root_path": "",
        "headers": [(name.encode(), value.encode("latin-1")) for name, value in given],
    }  # fmt: skip
    if kind == "http":
        scope["method"] = method

    async def receive():
        return {"type": "http.request"}

    async def send(message):
        sent.append(message)

    asyncio.run(access(scope, receive, send))
    return sent


def status(sent):
    return sent[0].get("status", sent[0]["type"])


def header(sent, name):
    return dict(sent[0]["headers"]).get(name.encode(), b"").decode()


def admitted(access):
    """The folder and the cookie that the address gives."""
    query = access.address.partition("?")[2]
    sent = ask(access, "/", query)
    assert status(sent) == 200
    cookie, path, *flags = header(sent, "set-cookie").split("; ")
    assert flags == ["HttpOnly", "SameSite=Strict"]
    return path.removeprefix("Path=").rstrip("/"), cookie


def test_the_address_gives_a_cookie_with_which_the_page_answers(access):
    folder, cookie = admitted(access)
    assert len(folder) == 33
    sent = ask(access, f"{folder}/lib/a.js", cookie=cookie)
    assert status(sent) == 200
    assert SEEN == ["/lib/a.js"]
    token = access.address.partition("token=")[2]
    assert token not in cookie
    assert token not in folder


def test_a_refusal_says_nothing_of_the_page(access):
    sent = ask(access)
    assert status(sent) == 403
    assert b"the page" not in sent[1]["body"]
    folder, _ = admitted(access)
    assert folder.encode() not in sent[1]["body"]


@pytest.mark.parametrize(
    "query", ["", "token=", "token=wrong", "token={t}x", "token={t}&token={t}", "TOKEN={t}", "token=ü"]
)
def test_without_the_token_it_answers_403(access, query):
    token = access.address.partition("token=")[2]
    assert status(ask(access, "/", query.format(t=token))) == 403
    assert SEEN == []


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    "cookie", ["", COOKIE, f"{COOKIE}=", f"{COOKIE}=wrong", "other={v}", f"{COOKIE}={{v}}x", "\x00;=,"]
)
def test_without_the_cookie_nothing_is_answered(access, kind, cookie):
    folder, true = admitted(access)
    value = true.partition("=")[2]
    sent = ask(access, f"{folder}/", kind=kind, cookie=cookie.format(v=value), origin=f"http://{HOST}")
    assert status(sent) == (403 if kind == "http" else "websocket.close")
    assert SEEN == []


@pytest.mark.parametrize("kind", ["http", "websocket"])
@pytest.mark.parametrize(
    "host",
    ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:1", f"localhost:{PORT}", f"127.0.0.1.evil:{PORT}",
     "", [], [HOST, "evil.example"], [HOST, HOST]],
)  # fmt: skip
def test_under_another_name_nothing_is_answered(access, kind, host):
    folder, cookie = admitted(access)
    sent = ask(access, f"{folder}/", kind=kind, host=host, cookie=cookie, origin=f"http://{HOST}")
    assert status(sent) == (403 if kind == "http" else "websocket.close")
    query = access.address.partition("?")[2]
    assert status(ask(access, "/", query, host=host)) == 403
    assert SEEN == []


@pytest.mark.parametrize("origin", ["http://evil.example", "null", f"https://{HOST}", "http://127.0.0.1:1", None])
def test_from_another_site_there_is_no_websocket_and_no_upload(access, origin):
    folder, cookie = admitted(access)
    given = {} if origin is None else {"origin": origin}
    assert status(ask(access, f"{folder}/websocket/", kind="websocket", cookie=cookie, **given)) == "websocket.close"
    assert status(ask(access, f"{folder}/upload", method="POST", cookie=cookie, **given)) == 403
    assert SEEN == []
    same = f"http://{HOST}"
    assert (
        status(ask(access, f"{folder}/websocket/", kind="websocket", cookie=cookie, origin=same)) == "websocket.accept"
    )
    assert status(ask(access, f"{folder}/upload", method="POST", cookie=cookie, origin=same)) == 200


def test_outside_the_folder_nothing_is_answered(access):
    folder, cookie = admitted(access)
    for path in ("/", folder, f"{folder}x/", "/lib/a.js", f"/{folder}/", folder.upper() + "/"):
        assert status(ask(access, path, cookie=cookie)) == 403
    assert SEEN == []


def test_every_answer_keeps_the_page_to_itself(access):
    folder, cookie = admitted(access)
    for sent in (ask(access), ask(access, f"{folder}/", cookie=cookie)):
        names = [name for name, _ in sent[0]["headers"]]
        assert len(names) == len(set(names))  # those of the page itself are replaced
        policy = header(sent, "content-security-policy")
        assert policy.startswith("default-src 'none'")
        assert "frame-ancestors 'none'" in policy
        assert "*" not in policy
        assert header(sent, "referrer-policy") == "no-referrer"
        assert header(sent, "cache-control") == "no-store"


def test_two_servers_have_nothing_in_common():
    first, second = Access(inner, PORT), Access(inner, PORT)
    folder, cookie = admitted(first)
    assert status(ask(second, f"{folder}/", cookie=cookie)) == 403
    assert status(ask(second, "/", first.address.partition("?")[2])) == 403
