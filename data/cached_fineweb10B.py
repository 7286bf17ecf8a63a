"""Downloads FineWeb, tokenised for the speedrun, from the Hugging Face hub.

    python data/cached_fineweb10B.py              # val and 9 train shards: what record #26 reads
    python data/cached_fineweb10B.py 103          # all of fineweb10B
    python data/cached_fineweb10B.py --dataset fineweb100B 20
    python data/cached_fineweb10B.py --verify     # reads every shard that is there; a table

A shard is 200 MB; shards go to data/<dataset> (--dir). One that is there counts only if its header
and size agree, and one that does not is named and fetched again. Several come at a time; a cut
connection and a stopped run go on where they were; each file's sha256 is checked where the hub
gives it, and the file gets its name only then. Unfinished files wait in DIR/.downloading, on the
same disk, so the hub's cache (~/.cache/huggingface) gets no copy.

HF_ENDPOINT names a mirror, HF_TOKEN a token; both are huggingface_hub's own variables.
"""

import argparse
import hashlib
import os
import re
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import httpx2  # huggingface_hub's HTTP client, whose errors come through it
from fineweb import count_tokens, first_line, inspect_shard, locked
from huggingface_hub import constants, get_hf_file_metadata, hf_hub_url
from huggingface_hub.errors import (
    HfHubHTTPError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from huggingface_hub.file_download import http_get
from huggingface_hub.utils import build_hf_headers, get_token
from tqdm import tqdm

DATASETS = {  # name: (repository, prefix of its files, train shards there)
    "fineweb10B": ("kjj0/fineweb10B-gpt2", "fineweb", 103),
    "fineweb100B": ("kjj0/fineweb100B-gpt2", "fineweb", 1030),
    "finewebedu10B": ("kjj0/finewebedu10B-gpt2", "finewebedu", 99),
}
# Record #26 takes 688 M tokens in batches that begin at documents, which passes over some tokens.
DEFAULT_SHARDS = 9
PARALLEL = 4  # files at a time: one connection seldom fills a fast line
RETRY_WAITS = (1, 2, 4)  # seconds before the second, third and fourth try
DISK_MARGIN = 64 << 20  # bytes that stay free, for the logs of the run to come
OTHER_WAYS = ("set HF_ENDPOINT to a mirror, or train on the offline sample (python data/sample.py) "
              "or on text of your own (python data/fineweb.py)")


@dataclass(frozen=True)
class Remote:
    """A file on the hub; sha256 is None where the hub does not give one."""

    name: str
    url: str
    size: int
    etag: str
    sha256: str | None


def find_remote(repository: str, name: str) -> Remote:
    """Asks the hub for a file's size and hash."""
    url = hf_hub_url(repository, name, repo_type="dataset")
    metadata = get_hf_file_metadata(url)
    if metadata.size is None or metadata.etag is None or metadata.commit_hash is None:
        raise ValueError(f"{url} does not answer as a hub does (no size, hash or commit); check "
                         "HF_ENDPOINT, and whether a proxy answers in the hub's place")
    # The hub's ETag of a large file is the sha256 of its content; others are git's hashes.
    sha256 = metadata.etag if re.fullmatch("[0-9a-f]{64}", metadata.etag) else None
    return Remote(name, url, metadata.size, metadata.etag, sha256)


def part_path(directory: Path, remote: Remote) -> Path:
    """Where the unfinished file waits; another version of it (another ETag) has another name."""
    return directory / ".downloading" / f"{remote.name}.{re.sub('[^0-9A-Za-z]', '', remote.etag)}"


def bytes_there(part: Path) -> int:
    """The bytes that an earlier try has left."""
    return part.stat().st_size if part.exists() else 0


def say(line: str) -> None:
    """Prints a line above the progress bars."""
    tqdm.write(line)
    sys.stdout.flush()


def fetch(remote: Remote, directory: Path) -> None:
    """Downloads what is missing of a file, checks it, and gives it its name."""
    part = part_path(directory, remote)
    if bytes_there(part) > remote.size:
        part.unlink()
    with part.open("ab") as file:
        http_get(remote.url, file, resume_size=file.tell(), headers=build_hf_headers(),
                 expected_size=remote.size, displayed_filename=remote.name)
    try:
        if remote.sha256 is not None:
            with part.open("rb") as file:
                digest = hashlib.file_digest(file, "sha256").hexdigest()
            if digest != remote.sha256:
                raise ValueError(f"{remote.name} came with sha256 {digest}, expected "
                                 f"{remote.sha256}")
        tokens = count_tokens(part)
    except ValueError:
        part.unlink()
        raise
    os.replace(part, directory / remote.name)
    for outdated in part.parent.glob(f"{remote.name}.*"):
        outdated.unlink()
    say(f"{directory / remote.name}: {tokens:,} tokens")


def is_transient(error: Exception) -> bool:
    """Whether another try may end better."""
    if isinstance(error, HfHubHTTPError):
        # 416: the hub refused to go on from where the unfinished file ends.
        return error.response.status_code in (408, 416, 429) or error.response.status_code >= 500
    if isinstance(error, OfflineModeIsEnabled | httpx2.UnsupportedProtocol):
        return False
    # An OSError without errno is http_get's, about a wrong length; with errno it is the disk's.
    return (isinstance(error, httpx2.TransportError | ValueError)
            or isinstance(error, OSError) and error.errno is None)


def retry(action: Callable, name: str):
    """Calls action until it succeeds, after the waits of RETRY_WAITS."""
    for wait in RETRY_WAITS:
        try:
            return action()
        except (httpx2.HTTPError, OSError, ValueError) as error:
            if not is_transient(error):
                raise
            say(f"{name}: {first_line(error)}; next try in {wait} s")
            time.sleep(wait)
    return action()


def explain(error: Exception, repository: str, name: str) -> str:
    """What went wrong with a file of the hub, and what to do."""
    hub = f"the hub at {constants.ENDPOINT}"
    status = error.response.status_code if isinstance(error, HfHubHTTPError) else None
    if isinstance(error, OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, which forbids downloads; unset it"
    if isinstance(error, RepositoryNotFoundError) or status in (401, 403):
        token = "refuses the token in use" if get_token() else "wants a token: set HF_TOKEN"
        return f"{hub} has no dataset {repository}, or {token}"
    if isinstance(error, RemoteEntryNotFoundError) or status == 404:
        return f"{hub} has no file {name} in dataset {repository}; {OTHER_WAYS}"
    if isinstance(error, httpx2.HTTPError | httpx2.InvalidURL):
        return f"{hub} cannot be reached ({first_line(error)}); {OTHER_WAYS}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"{name} cannot be written: {error.strerror}"
    return first_line(error)


def find_missing(directory: Path, names: list[str]) -> list[str]:
    """The names of which directory has no file whose header and size agree."""
    missing = []
    for name in names:
        try:
            count_tokens(directory / name)
        except FileNotFoundError:
            missing.append(name)
        except ValueError as error:
            print(f"damaged: {error}; it is fetched again", flush=True)
            missing.append(name)
    return missing


def check_disk(directory: Path, remotes: list[Remote]) -> None:
    """A ValueError if the disk of directory cannot take what is still to come."""
    needed = sum(r.size - min(r.size, bytes_there(part_path(directory, r))) for r in remotes)
    free = shutil.disk_usage(directory).free
    if needed + DISK_MARGIN > free:
        raise ValueError(
            f"{len(remotes)} files need {needed / 1e9:.1f} GB, but {directory} has "
            f"{free / 1e9:.1f} GB free; ask for fewer shards or name another --dir"
        )


def download(repository: str, names: list[str], directory: Path) -> None:
    """Downloads files; a ValueError names those that did not come, after all others have."""

    def find(name: str) -> Remote:
        try:
            return retry(lambda: find_remote(repository, name), name)
        except (httpx2.HTTPError, httpx2.InvalidURL, OSError, ValueError) as error:
            raise ValueError(explain(error, repository, name)) from None

    def fetch_or_explain(remote: Remote) -> str | None:
        try:
            retry(lambda: fetch(remote, directory), remote.name)
        except (httpx2.HTTPError, OSError, ValueError) as error:
            return explain(error, repository, remote.name)

    (directory / ".downloading").mkdir(exist_ok=True)
    pool = ThreadPoolExecutor(PARALLEL)
    # The first alone: a hub that cannot be reached is then said once.
    remotes = [find(names[0]), *pool.map(find, names[1:])]
    check_disk(directory, remotes)
    reasons = [reason for reason in pool.map(fetch_or_explain, remotes) if reason]
    if reasons:
        raise ValueError(f"{len(reasons)} of {len(names)} files did not come: {reasons[0]}")
    shutil.rmtree(directory / ".downloading")


def verify(directory: Path) -> bool:
    """Reads every shard in directory and prints a table; whether all are good."""
    paths = sorted(directory.glob("*.bin"))
    if not paths:
        raise ValueError(f"{directory} has no shards (*.bin) to verify")
    width = max(len(path.name) for path in paths)
    bad = 0
    print(f"{'shard':{width}}  {'tokens':>13}  {'documents':>9}  {'largest':>7}  verdict")
    for path in paths:
        try:
            shard = inspect_shard(path)
            print(f"{path.name:{width}}  {shard.tokens:13,}  {shard.documents:9,}  "
                  f"{shard.largest_token:7}  good", flush=True)
        except (OSError, ValueError) as error:
            bad += 1
            print(f"{path.name:{width}}  {'-':>13}  {'-':>9}  {'-':>7}  BAD: {error}", flush=True)
    print(f"{len(paths) - bad} good, {bad} bad")
    return bad == 0


def parse_arguments() -> argparse.Namespace:
    """The command line, checked."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("shards", nargs="?", type=int, default=DEFAULT_SHARDS, metavar="N",
                        help="train shards (default: %(default)s, what record #26 reads)")
    parser.add_argument("--dataset", choices=DATASETS, default="fineweb10B")
    parser.add_argument("--dir", type=Path, help="where they go (default: data/<dataset>)")
    parser.add_argument("--verify", action="store_true",
                        help="download nothing; read every shard that is there")
    arguments = parser.parse_args()
    most = DATASETS[arguments.dataset][2]
    if not 0 <= arguments.shards <= most:
        parser.error(f"expected N from 0 to {most} ({arguments.dataset} has {most} train shards), "
                     f"got {arguments.shards}")
    if arguments.dir is None:
        arguments.dir = Path(os.path.relpath(Path(__file__).parent / arguments.dataset))
    return arguments


def main() -> None:
    """Downloads what is missing, or verifies what is there."""
    arguments = parse_arguments()
    repository, prefix, _ = DATASETS[arguments.dataset]
    directory = arguments.dir
    names = [f"{prefix}_val_000000.bin"]
    names += [f"{prefix}_train_{i:06d}.bin" for i in range(1, arguments.shards + 1)]
    try:
        if arguments.verify:
            sys.exit(0 if verify(directory) else 1)
        with locked(directory):
            if missing := find_missing(directory, names):
                print(f"{len(names) - len(missing)} of {len(names)} files are there, "
                      f"{len(missing)} to fetch from {repository}", flush=True)
                download(repository, missing, directory)
        print(f"{directory} has val and {arguments.shards} train shards")
    except (OSError, ValueError) as error:
        sys.exit(f"data/cached_fineweb10B.py: {error}")
    except KeyboardInterrupt:
        print("data/cached_fineweb10B.py: interrupted; the same command goes on from here",
              file=sys.stderr, flush=True)
        os._exit(130)  # sys.exit would wait for the end of the downloads in flight


if __name__ == "__main__":
    main()
