"""data/cached_fineweb10B.py: downloads, resumes, repairs, refuses and verifies.

The hub is a real HTTP server on loopback that answers as the Hugging Face hub does: HEAD with
X-Repo-Commit, X-Linked-Etag and X-Linked-Size and a redirect, GET with Range from a second host,
and faults on demand. Shards have a few thousand tokens.

Needs: nothing; no network.
Run:   bash scripts/test.sh tests/test_download.py
"""

import hashlib
import http.server
import os
import signal
import subprocess
import sys
import threading
import time
from collections import defaultdict
from pathlib import Path

import numpy as np
import pytest

SCRIPT = Path(__file__).parent.parent / "data" / "cached_fineweb10B.py"
BOS = 50256
VAL = "fineweb_val_000000.bin"
CHUNK = 10 << 20  # bytes that huggingface_hub gathers before it writes them to a file
TRAIN = [f"fineweb_train_{i:06d}.bin" for i in range(1, 4)]


def shard(tokens, magic=20240520, version=1, count=None):
    """The bytes of a shard; magic, version and count can be wrong."""
    header = np.zeros(256, dtype="<i4")
    header[:3] = magic, version, len(tokens) if count is None else count
    return header.tobytes() + np.array(tokens, dtype="<u2").tobytes()


def good_shard(seed, size=5000):
    tokens = np.random.default_rng(seed).integers(0, BOS, size)
    tokens[::100] = BOS
    return shard(tokens)


class Hub:
    """Serves files; `faults[name]` are spent one by one on the GETs of a file, the last one ever.

    HEAD goes to 127.0.0.1 (the hub), which redirects GET to localhost (the CDN): two hosts for the
    client, so that a token must not follow.
    """

    def __init__(self, repository="kjj0/fineweb10B-gpt2", prefix="fineweb", etag="sha256"):
        self.root = f"/datasets/{repository}/resolve/main/"
        self.files = {f"{prefix}_val_000000.bin": good_shard(0)}
        self.files |= {f"{prefix}_train_{i:06d}.bin": good_shard(i) for i in range(1, 4)}
        self.faults = defaultdict(list)
        self.head_faults = defaultdict(list)
        self.sizes = {}
        self.etag = etag
        self.requests = []
        hub = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def log_message(self, *_):
                pass

            def do_HEAD(self):
                hub.head(self)

            def do_GET(self):
                hub.get(self)

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.02,), daemon=True).start()

    @staticmethod
    def answer(handler, status, headers=(), body=b""):
        handler.send_response(status)
        for key, value in {"Content-Length": str(len(body)), **dict(headers)}.items():
            handler.send_header(key, value)
        handler.end_headers()
        if handler.command == "GET":
            handler.wfile.write(body)

    def head(self, handler):
        self.requests.append(("HEAD", handler.path, dict(handler.headers)))
        name = handler.path.removeprefix(self.root)
        if self.head_faults[name]:
            fault = self.head_faults[name].pop(0)
            if fault == "html":
                return self.answer(handler, 200, {"Content-Type": "text/html"}, b"log in first")
            return self.answer(handler, fault)
        if not handler.path.startswith(self.root):
            return self.answer(handler, 401, {"X-Error-Code": "RepoNotFound"})
        if name not in self.files:
            return self.answer(handler, 404, {"X-Error-Code": "EntryNotFound"})
        raw = self.files[name]
        self.answer(handler, 302, {
            "X-Repo-Commit": "c" * 40,
            "X-Linked-Etag": f'"{hashlib.new(self.etag, raw).hexdigest()}"',
            "X-Linked-Size": str(self.sizes.get(name, len(raw))),
            "Location": f"http://localhost:{self.server.server_port}/cdn/{name}",
        })

    def get(self, handler):
        self.requests.append(("GET", handler.path, dict(handler.headers)))
        if handler.path.startswith(self.root):
            name = handler.path.removeprefix(self.root)
            location = f"http://localhost:{self.server.server_port}/cdn/{name}"
            return self.answer(handler, 302, {"Location": location})
        name = handler.path.removeprefix("/cdn/")
        if name not in self.files:
            return self.answer(handler, 404)
        raw, faults = self.files[name], self.faults[name]
        fault = faults.pop(0) if len(faults) > 1 else faults[0] if faults else None
        if isinstance(fault, int):
            return self.answer(handler, fault)
        start, status, headers = 0, 200, {}
        if (asked := handler.headers.get("Range")) and fault != "no range":
            start = int(asked.removeprefix("bytes=").removesuffix("-"))
            status = 206
            headers["Content-Range"] = f"bytes {start}-{len(raw) - 1}/{len(raw)}"
        body = raw[start:]
        if fault == "changed":
            body = body[:-1] + bytes([body[-1] ^ 1])
        if fault == "truncated":  # in good order, but short of the size that HEAD gave
            body = body[: len(body) // 2]
        if fault in ("cut", "stall"):
            handler.send_response(status)
            for key, value in {"Content-Length": str(len(body)), **headers}.items():
                handler.send_header(key, value)
            handler.end_headers()
            handler.wfile.write(body[: len(body) // 2])
            handler.wfile.flush()
            if fault == "stall":
                time.sleep(30)  # until the client is interrupted
            handler.close_connection = True
            return None
        return self.answer(handler, status, headers, body)

    def got(self, name, method="GET"):
        """The headers of the requests that reached the CDN (GET) or the hub (HEAD) for a file."""
        path = f"/cdn/{name}" if method == "GET" else self.root + name
        return [headers for m, p, headers in self.requests if (m, p) == (method, path)]


@pytest.fixture
def hub():
    with_server = Hub()
    yield with_server
    with_server.server.shutdown()


@pytest.fixture
def big_val(hub):
    """Gives the hub a val shard of which half is more than one CHUNK."""
    hub.files[VAL] = good_shard(0, size=12_000_000)


def ranges(requests):
    """What each request asked for, None for the whole file."""
    return [{k.lower(): v for k, v in headers.items()}.get("range") for headers in requests]


def start(endpoint, directory, *arguments, **environment):
    environment = os.environ | {"HF_ENDPOINT": endpoint, "NO_PROXY": "*"} | environment
    command = [sys.executable, str(SCRIPT), "--dir", str(directory), *map(str, arguments)]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
                            env=environment)


def finish(process):
    stdout, stderr = process.communicate(timeout=60)
    return subprocess.CompletedProcess(process.args, process.returncode, stdout, stderr)


def run(endpoint, directory, *arguments, **environment):
    return finish(start(endpoint, directory, *arguments, **environment))


def assert_complete(result, hub, directory, names):
    assert result.returncode == 0, result.stderr
    found = {path.name: path.read_bytes() for path in directory.iterdir()}
    assert found == {name: hub.files[name] for name in names}  # and no unfinished files


def assert_one_sentence(result, *parts):
    assert result.returncode == 1, result.stderr
    sentence = [s for s in result.stderr.strip().splitlines() if s.startswith("data/cached")]
    assert len(sentence) == 1, result.stderr
    assert "Traceback" not in result.stderr
    for part in parts:
        assert part in sentence[0]


# -------------------------------------------------------------------------------
# Downloads that succeed

@pytest.mark.parametrize("count", [0, 2])
def test_val_and_n_train_shards(hub, tmp_path, count):
    result = run(hub.endpoint, tmp_path, count)
    assert_complete(result, hub, tmp_path, [VAL, *TRAIN[:count]])
    assert f"{tmp_path / VAL}: 5,000 tokens" in result.stdout


def test_second_call_asks_nothing(hub, tmp_path):
    run(hub.endpoint, tmp_path, 1)
    hub.requests.clear()
    assert_complete(run(hub.endpoint, tmp_path, 1), hub, tmp_path, [VAL, TRAIN[0]])
    assert hub.requests == []


def test_other_dataset(tmp_path):
    hub = Hub("kjj0/finewebedu10B-gpt2", "finewebedu")
    result = run(hub.endpoint, tmp_path, 1, "--dataset", "finewebedu10B")
    names = ["finewebedu_val_000000.bin", "finewebedu_train_000001.bin"]
    assert_complete(result, hub, tmp_path, names)
    hub.server.shutdown()


def test_nothing_is_left_in_the_hub_cache(hub, tmp_path):
    result = run(hub.endpoint, tmp_path / "data", 1, HF_HOME=str(tmp_path / "home"))
    assert_complete(result, hub, tmp_path / "data", [VAL, TRAIN[0]])
    assert not list((tmp_path / "home").rglob("*.bin*"))


def test_token_reaches_the_hub_and_not_the_cdn(hub, tmp_path):
    assert run(hub.endpoint, tmp_path, 0, HF_TOKEN="hf_secret").returncode == 0
    assert hub.got(VAL, "HEAD")[0]["authorization"] == "Bearer hf_secret"
    assert "authorization" not in {key.lower() for key in hub.got(VAL)[0]}


def test_faults_are_overcome(hub, big_val, tmp_path):
    hub.head_faults[VAL] = [503]
    hub.faults[VAL] = ["cut", None]
    hub.faults[TRAIN[0]] = [503, None]
    hub.faults[TRAIN[1]] = ["truncated", None]
    hub.faults[TRAIN[2]] = ["changed", None]
    result = run(hub.endpoint, tmp_path, 3)
    assert_complete(result, hub, tmp_path, [VAL, *TRAIN])
    # Cut and truncated: only the rest is asked for. Changed: all of it again.
    half = len(hub.files[TRAIN[1]]) // 2
    assert ranges(hub.got(VAL)) == [None, f"bytes={CHUNK}-"]
    assert ranges(hub.got(TRAIN[1])) == [None, f"bytes={half}-"]
    assert ranges(hub.got(TRAIN[2])) == [None, None]
    assert f"{TRAIN[0]}: " in result.stdout  # the next try is announced
    assert "sha256" in result.stdout


def test_server_without_range(hub, big_val, tmp_path):
    hub.faults[VAL] = ["cut", "no range"]
    assert_complete(run(hub.endpoint, tmp_path, 0), hub, tmp_path, [VAL])
    assert ranges(hub.got(VAL)) == [None, f"bytes={CHUNK}-"]


def test_hub_without_sha256(tmp_path):
    hub = Hub(etag="sha1")  # as of a file kept in git itself
    hub.faults[VAL] = ["changed", None]  # in a token, so that nothing can notice it
    result = run(hub.endpoint, tmp_path, 0)
    assert result.returncode == 0, result.stderr
    assert (tmp_path / VAL).read_bytes()[:-1] == hub.files[VAL][:-1]
    hub.server.shutdown()


@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGKILL])
def test_interrupted_download_goes_on(hub, big_val, tmp_path, sign):
    hub.faults[VAL] = ["stall", None]
    hub.faults[TRAIN[0]] = [None]
    process = start(hub.endpoint, tmp_path, 1)
    part = tmp_path / ".downloading"
    while process.poll() is None and not (
        (tmp_path / TRAIN[0]).exists()
        and any(p.stat().st_size == CHUNK for p in part.glob(VAL + ".*"))  # not within its write
    ):
        time.sleep(0.02)
    assert not (tmp_path / VAL).exists()  # invisible until complete
    process.send_signal(sign)
    begun = time.monotonic()
    first = finish(process)
    assert time.monotonic() - begun < 20  # not after the download that stalls
    assert "Traceback" not in first.stderr
    if sign == signal.SIGINT:
        assert first.returncode == 130
        assert "goes on from here" in first.stderr
    hub.requests.clear()
    assert_complete(run(hub.endpoint, tmp_path, 1), hub, tmp_path, [VAL, TRAIN[0]])
    assert ranges(hub.got(VAL)) == [f"bytes={CHUNK}-"]
    assert hub.got(TRAIN[0]) == []


# -------------------------------------------------------------------------------
# Shards that are damaged

DAMAGED = {  # what is wrong: (bytes, words of the verdict, whether header and size tell)
    "empty file": (b"", "0 bytes", True),
    "header cut": (good_shard(1)[:1000], "1,000 bytes", True),
    "bad magic": (shard([BOS, 1], magic=20240521), "20240521", True),
    "wrong version": (shard([BOS, 1], version=2), "version 2", True),
    "count too large": (shard([BOS, 1], count=3), "1,030 by its header", True),
    "count too small": (shard([BOS, 1], count=1), "1,026 by its header", True),
    "count negative": (shard([BOS, 1], count=-1), "-1 tokens", True),
    "odd bytes": (shard([BOS, 1]) + b"\0", "1,029 bytes", True),
    "no tokens": (shard([]), "0 tokens", True),
    "token above GPT-2's": (shard([BOS, 1, 50257]), "token 50257 at position 2", False),
    "no document begins": (shard([1, 2, 3]), "no token 50256", False),
}


def test_damaged_shards_are_named_and_fetched_again(hub, tmp_path):
    damaged = {kind: raw for kind, (raw, _, by_header) in DAMAGED.items() if by_header}
    hub.files |= {f"fineweb_train_{i:06d}.bin": good_shard(i) for i in range(1, len(damaged))}
    names = list(hub.files)[: len(damaged)]
    for name, raw in zip(names, damaged.values(), strict=True):
        (tmp_path / name).write_bytes(raw)
    result = run(hub.endpoint, tmp_path, len(damaged) - 1)
    assert_complete(result, hub, tmp_path, names)
    for name, kind in zip(names, damaged, strict=True):
        (line,) = [s for s in result.stdout.splitlines() if s.startswith("damaged:") and name in s]
        assert DAMAGED[kind][1] in line


def test_verify_names_each_damage(tmp_path):
    (tmp_path / VAL).write_bytes(good_shard(0))
    for kind, (raw, _, _) in DAMAGED.items():
        (tmp_path / f"{kind}.bin").write_bytes(raw)
    result = run("http://127.0.0.1:9", tmp_path, "--verify")  # asks no hub
    assert result.returncode == 1
    rows = {row.split("  ")[0].strip(): row for row in result.stdout.splitlines()}
    assert rows[VAL].split()[1:] == ["5,000", "50", "50256", "good"]
    for kind, (_, words, _) in DAMAGED.items():
        assert "BAD" in rows[f"{kind}.bin"]
        assert words in rows[f"{kind}.bin"]
    assert result.stdout.endswith(f"1 good, {len(DAMAGED)} bad\n")


@pytest.mark.parametrize("count", [0, 1, 2])
def test_verify_of_good_shards(tmp_path, count):
    for name in TRAIN[:count]:
        (tmp_path / name).write_bytes(good_shard(1))
    result = run("http://127.0.0.1:9", tmp_path, "--verify")
    if count == 0:
        assert_one_sentence(result, str(tmp_path), "no shards")
    else:
        assert result.returncode == 0
        assert result.stdout.endswith(f"{count} good, 0 bad\n")


# -------------------------------------------------------------------------------
# Downloads that fail

@pytest.fixture(scope="module")
def failures(tmp_path_factory):
    """Each lasting failure tries for 7 s before it gives up: they run at the same time."""
    hubs = {kind: Hub() for kind in ("503", "503 on GET", "changed", "html", "not a shard")}
    hubs["503"].head_faults[VAL] = [503] * 9
    hubs["503 on GET"].faults[TRAIN[0]] = [503]
    hubs["changed"].faults[TRAIN[0]] = ["changed"]
    hubs["html"].head_faults[VAL] = ["html"] * 9
    hubs["not a shard"].files[TRAIN[0]] = b"x" * 5000
    endpoints = {kind: hub.endpoint for kind, hub in hubs.items()}
    endpoints["unreachable"] = "http://127.0.0.1:9"
    places = {kind: tmp_path_factory.mktemp("failure") for kind in endpoints}
    processes = {kind: start(endpoints[kind], places[kind], 1) for kind in endpoints}
    yield {
        kind: (finish(process), endpoints[kind], places[kind])
        for kind, process in processes.items()
    }
    for hub in hubs.values():
        hub.server.shutdown()


@pytest.mark.parametrize(("kind", "part"), [
    ("unreachable", "cannot be reached"),
    ("503", "503"),
    ("503 on GET", "503"),
    ("changed", "sha256"),
    ("html", "does not answer as a hub"),
    ("not a shard", "magic"),
])
def test_lasting_failure_is_one_sentence(failures, kind, part):
    result, endpoint, place = failures[kind]
    assert_one_sentence(result, part)
    assert not (place / TRAIN[0]).exists()
    if kind in ("unreachable", "503", "503 on GET"):
        assert_one_sentence(result, endpoint, "HF_ENDPOINT", "data/sample.py", "data/fineweb.py")
    if kind in ("503 on GET", "changed"):
        assert (place / VAL).exists()  # the others came


def test_missing_file_is_one_sentence(hub, tmp_path):
    del hub.files[TRAIN[0]]
    assert_one_sentence(run(hub.endpoint, tmp_path, 1), TRAIN[0], "kjj0/fineweb10B-gpt2")


def test_missing_dataset_is_one_sentence(hub, tmp_path):
    result = run(hub.endpoint, tmp_path, 1, "--dataset", "fineweb100B")
    assert_one_sentence(result, "kjj0/fineweb100B-gpt2", "HF_TOKEN")


def test_offline_mode_is_one_sentence(hub, tmp_path):
    assert_one_sentence(run(hub.endpoint, tmp_path, 1, HF_HUB_OFFLINE="1"), "HF_HUB_OFFLINE")


def test_endpoint_that_is_no_address(tmp_path):
    assert_one_sentence(run("nonsense", tmp_path, 1), "nonsense", "HF_ENDPOINT")


def test_full_disk_is_one_sentence_before_the_download(hub, tmp_path):
    hub.sizes[VAL] = 10**15
    assert_one_sentence(run(hub.endpoint, tmp_path, 0), "1000000.0 GB", str(tmp_path))
    assert hub.got(VAL) == []


def test_disk_that_fills_up_is_one_sentence(hub, tmp_path):
    # A limit on the size of files stands in for the disk: the write fails in the same place.
    limited = ["bash", "-c", 'ulimit -f 3 && exec "$@"', "bash", sys.executable, str(SCRIPT)]
    result = subprocess.run([*limited, "--dir", str(tmp_path), "0"], capture_output=True, text=True,
                            env=os.environ | {"HF_ENDPOINT": hub.endpoint, "NO_PROXY": "*"})
    assert_one_sentence(result, f"{VAL} cannot be written: ")
    assert not (tmp_path / VAL).exists()


def test_place_that_is_a_file(hub, tmp_path):
    (tmp_path / "file").write_text("")
    assert_one_sentence(run(hub.endpoint, tmp_path / "file", 1), "file")


def test_two_runs_in_one_place(hub, tmp_path):
    hub.faults[VAL] = ["stall", None]
    first = start(hub.endpoint, tmp_path, 0)
    while first.poll() is None and not hub.got(VAL):
        time.sleep(0.02)
    assert_one_sentence(run(hub.endpoint, tmp_path, 0), "another run")
    first.kill()
    finish(first)


@pytest.mark.parametrize("count", ["-1", "104", "many"])
def test_wrong_count(tmp_path, count):
    result = run("http://127.0.0.1:9", tmp_path, count)
    assert result.returncode == 2
    assert count in result.stderr
    assert "Traceback" not in result.stderr
