"""Prepare the SpamAssassin mails for training: clean, find near-duplicates, split.

Cleaning takes out what tells the *collection* apart and not the message: list tags and footers, signatures,
quoted text, addresses, dates, the posters' own names.  The split keeps every cluster of near-duplicates, and
every thread, on one side.
"""

from __future__ import annotations

import html
import json
import random
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import sparse
from sklearn.feature_extraction.text import CountVectorizer

JACCARD = 0.5  # two mails that share this much of their word 5-shingles are one mail
CONTAINMENT = 0.6  # as is a mail that lies this far inside another one (digests, newsletters of one sender)
CONTAINMENT_FLOOR = 20  # shingles; below it a shared stock phrase would be enough
HELD_OUT, VALIDATION = 0.20, 0.08
MAX_CHARS = 8000  # far beyond the model's context; drops attachments pasted as text
MIN_WORDS = 4


@dataclass(frozen=True)
class Mail:
    """One cleaned mail; `cluster` joins near-duplicates, `side` joins clusters of one thread for the
    split.
    """

    row: int  # line number in the data file
    label: int  # 1 = spam
    source: str
    raw: str
    text: str
    cluster: int = -1
    side: int = -1


# --- cleaning
# ---------------------------------------------------------------------------------------------------

REPLY = re.compile(r"^\s*(?:(?:re|fwd?|aw|antwort|sv)(?:\[\d+\])?\s*:\s*|fwd\b\s*)+", re.IGNORECASE)
TAG = re.compile(r"^\s*\[[^\]\n]{2,32}\]\s*")
WAS = re.compile(r"[(\[]\s*was:?\s.*$|\(fwd\)", re.IGNORECASE)

BLOCKS = [
    re.compile(p, re.MULTILINE | re.DOTALL | re.IGNORECASE)
    for p in (
        r"-----BEGIN PGP SIGNATURE-----.*?(?:-----END PGP SIGNATURE-----|\Z)",
        r"-----BEGIN PGP SIGNED MESSAGE-----\s*(?:Hash: \w+)?",
        # sponsor of the list host, up to the footer's rule or the end of the mail
        r"^-{20,}\s*\n(?:Sponsored by|In remembrance|This sf\.net[^\n]*sponsored by).*?(?=^_{20,}|\Z)",
        r"^This (?:sf\.net|sf) e?-?mail is sponsored by.*?(?=^_{20,}|\Z)",
        r"^-+ Yahoo! Groups Sponsor -+.*?-~->",
        r"^To unsubscribe from this group, send an e?mail to:.*?(?:info/terms/?|\Z)",
        r"^Your use of Yahoo! Groups is subject to.*?$",
        # "____ / X mailing list / X@host / listinfo address"
        r"^_{20,}\s*\n[^\n]*mailing list.*?(?=\n\n|\Z)",
        r"^Irish Linux Users'? Group.*?(?:List maintainer[^\n]*|\Z)",
        r"^To unsubscribe[^\n]*send[^\n]*unsubscribe.*?(?=\n\n|\Z)(?<=linux\.ie)",
        r"^_{20,}\s*\n[^\n]*(?:MSN|Hotmail|Yahoo)[^\n]*(?:\n[^\n]+)*",
        r"^Do you Yahoo!\?.*?(?=\n\n|\Z)",
        r"^You have received this message because you subscribed.*?(?=\n\n|\Z)",
        r"^-{4,} ?You are receiving this mail because: ?-{4,}.*?(?=\n\n|\Z)",
        r"^(?:The e-mail address for your subscription is|Your e-mail address is)[^\n]*$",
        # who wrote what is quoted, on one line or two
        (
            r"^[>\s]*(?:On|At|Le|In|Once upon a time|From)\b[^\n]{0,160}(?:\n[^\n]{0,90})?"
            r"\b(?:wrote|writes|said|scribbled|mentioned|stated)\b[^\n]{0,12}$"
        ),
        r"^[^\n]{0,90}(?:wrote|writes|said|typed|mentioned|posted)\s*[*.]*:\s*\.*$",
        r"^(?:On [^\n]{0,90} )?stated the following[^\n]*$",
        r"^-{3,}\n(?:[^\n]{1,90}\n){1,7}-{3,}$",  # a signature fenced by rules, amid the text
        r"^[ \t]*posted by \w+ on[^\n]*$",
        r"^[ \t]*Copyright [\d-]* ?pudge[^\n]*$",
        r"Link\[\d\] Discuss\[\d\](?:\s*\(_Thanks,[^\n]*_\))?",
        r"^\[[^\s\]]{15,}\]\s*$",  # hash a mailer left at the end
    )
]
HEADER = (
    r"(?:From|To|Cc|Bcc|Sent|Date|Reply-To|Return-Path|Received|Message-I[dD]|In-Reply-To|References|URL|Sender"
    r"|Delivered-To|MIME-Version|Content-[\w-]+|X-[\w-]+|List-[\w-]+|Precedence|Organization|User-Agent)"
)
DROP_LINES = [
    re.compile(p, re.MULTILINE)
    for p in (
        rf"^[ \t>|]*{HEADER}: [^\n]*$",
        r"^[ \t]*[>|}:][^\n]*$",  # quoted text: it is another mail, often one of the set
        r"^[ \t]*[A-Za-z]{1,10}>[^\n]*$",  # quoted with initials ("Paul> ...")
        r"^[^\n]*-{3,} ?(?:Original|Forwarded|(?i:begin|end)(?: forwarded)?)\b[^\n]*$",
        r"^[^\n]*(?i:deathtospam|lists?/listinfo|mailman/listinfo|unsubscription information)[^\n]*$",
        r"^[^\n]*(?i:list maintainer|taint\.org)[^\n]*$",
        r"^[^\n]*(?:zzzz|qqqq|xxxx|Xxxx|Yyyy)[^\n]*$",
        r"^[^\n]*(?i:mailing list)[ \t]*(?:<[^>\n]*>)?[ \t]*$",
        r"^[ \t]*(?:--\.?[a-zA-Z]{1,2}\.?|/{2,}|-{2}[\w.=]{12,}-{0,2})[ \t]*$",  # "--j.", MIME boundaries
    )
]
ADDRESS = re.compile(
    r"<?\b(?:https?|ftp|mailto|news):[^\s>)\]]*>?"
    r"|<?[\w.+=-]+(?:@| at )[\w-]+(?:(?:\.| dot )[\w-]+)+>?"
    r"|\b(?:[\w-]+\.)+(?:com|org|net|edu|gov|info|biz|ie|uk|de|fr|no|fi|nl|es|it|ca|au|jp|kr|ru|nu|to|cc|us)\b"
    r"(?:/[^\s>)]*)?"
    r"|<[^\s<>]{6,}>",
    re.IGNORECASE,
)
MONTH = r"(?:Jan|Feb|Mar|Apr|May|Jun|Jul|Aug|Sept?|Oct|Nov|Dec)[a-z]*\.?"
DATE = re.compile(
    r"\b(?:(?:Mon|Tue|Wed|Thu|Fri|Sat|Sun)[a-z]*,? )?"
    rf"(?:\d{{1,2}}(?:st|nd|rd|th)?[ -]{MONTH}(?:[ ,-]+\d{{2,4}})?"
    rf"|{MONTH} \d{{1,2}}(?:st|nd|rd|th)?(?:,? \d{{4}})?)\b"
    r"|\b\d{1,4}[/-]\d{1,2}[/-]\d{1,4}(?:T[\d:+-]+)?\b|\b\d{1,2}:\d\d:\d\d\b(?: ?[+-]\d{4})?"
    r"|\b(?:19[89]|20[01])\d(?:-\d{4})?\b|[+-]0\d00\b",
    re.IGNORECASE,
)
# Names of the lists, their hosts and the collection; whole words.
COLLECTION = re.compile(
    r"\b\w*(?:spam-?assassin|zzzz|qqqq|sourceforge|freshrpms|rpmforge|forteana|jmason|egroups|netnote)\w*\b"
    r"|\b(?:ilug(?:-social)?|satalk|sadev|sacvs|sa-?talk|spambayes|razor-(?:users|list)|iiu|sightings|xent|yyyy"
    r"|exmh(?:-(?:users|workers))?|rpm-(?:list|zzz)|lockergnome|gnome-?report|zdnet|cnet|osdn|sf\.net|thinkgeek|newsisfree"
    r"|xxxx+|neteze|webmaster|fork(?:ers?|ed|ing)?)\b",
    re.IGNORECASE,
)
ATTRIBUTION = re.compile(
    r"(?:^|, |> ?)((?:[A-Z][\w.'-]+ ){1,3})(?:[<(\[][^\n>)\]]*[>)\]] ?)?(?:wrote|writes|said)\b"
    r"|^[ \t>]*From: \"?((?:[A-Z][\w.'-]+ ?){1,3})",
    re.MULTILINE,
)
WORD = re.compile(r"[^\W\d_]+(?:'[^\W\d_]+)?")


def harvest_names(texts: Iterable[str]) -> frozenset[str]:
    """Names of the lists' writers: words of attribution lines that are nearly always capitalised elsewhere
    too.
    """
    found: Counter[str] = Counter()
    upper: Counter[str] = Counter()
    total: Counter[str] = Counter()
    for text in texts:
        text = ADDRESS.sub(" ", text)  # addresses hold names in lower case
        for match in ATTRIBUTION.finditer(text):
            found.update({w for w in WORD.findall(match[1] or match[2]) if len(w) > 2})
        for word in WORD.findall(text):
            total[word.lower()] += 1
            upper[word.lower()] += word[0].isupper()
    return frozenset(w for w in found if found[w] >= 2 and upper[w.lower()] >= 0.9 * total[w.lower()])


def drop_signature(body: str) -> str:
    """Cut at a line "-- " (or "--") when only a signature's worth of text follows it; newsletters use it as
    a rule.
    """
    lines = body.rstrip().split("\n")
    for i, line in enumerate(lines):
        rest = [x for x in lines[i + 1 :] if x.strip()]
        if line.strip() in ("--", "---", "- --", "-- --") and i and len(rest) <= 12 and sum(map(len, rest)) <= 700:
            return "\n".join(lines[:i])
    return body


def drop_signoff(body: str) -> str:
    """Take off a name that closes the mail: one or two last lines of at most three words, all capitalised."""
    lines = body.rstrip().split("\n")
    for _ in range(2):
        words = lines[-1].split()
        named = (
            len(words) <= 3
            and all(w[0].isupper() or not w[0].isalnum() for w in words)
            and not re.search(r"[!?$%:]", lines[-1])
            and not lines[-1].isupper()
        )
        if len(lines) > 1 and (named or re.fullmatch(r"[ \t]*(?:[a-z]{2,9}|[A-Z]{2,4})[ \t]*", lines[-1])):
            lines.pop()
    return "\n".join(lines)


def clean(raw: str, names: frozenset[str]) -> str:
    """The message of a mail (subject, blank line, body) without the marks of the collection."""
    subject, _, body = raw.partition("\n")
    for _ in range(3):
        subject = TAG.sub("", REPLY.sub("", subject))
    subject = WAS.sub("", subject)
    body = html.unescape(body[: 4 * MAX_CHARS])
    for pattern in BLOCKS:
        body = pattern.sub("\n", body)
    body = drop_signature(body)
    for pattern in DROP_LINES:
        body = pattern.sub("", body)
    body = drop_signoff(body)
    text = subject.strip() + "\n\n" + body.strip()
    for pattern in (ADDRESS, DATE, COLLECTION):
        text = pattern.sub(" ", text)
    text = WORD.sub(lambda m: " " if m[0] in names or m[0].removesuffix("'s") in names else m[0], text)
    text = re.sub(r"([^\w\s])\1{3,}", r"\1\1\1", text)  # rules and other runs of one sign
    text = re.sub(r"[ \t\u00a0]+", " ", text)
    return re.sub(r"\s*\n\s*\n\s*", "\n\n", text).strip()[:MAX_CHARS]


def is_english_script(text: str) -> bool:
    """Whether the letters are Latin; mails in an undecoded or another script are not this model's
    business.
    """
    letters = [c for c in text if c.isalpha() or c == "\ufffd"]
    return sum("a" <= c.lower() <= "z" for c in letters) >= 0.9 * len(letters)


def load(path: Path) -> tuple[list[Mail], dict[str, int]]:
    """Clean mails in file order, exact repeats removed, with the counts of what was dropped."""
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    names = harvest_names(r["text"] for r in rows)
    counts = Counter(read=len(rows))
    seen: set[str] = set()
    mails = []
    for i, row in enumerate(rows):
        text = clean(row["text"], names)
        words = [w.lower() for w in WORD.findall(text)]
        key = " ".join(words)
        if len(words) < MIN_WORDS:
            counts["too short"] += 1
        elif not is_english_script(text):
            counts["other script"] += 1
        elif key in seen:
            counts["exact repeats"] += 1
        else:
            seen.add(key)
            mails.append(Mail(i, row["label"], row["group"], row["text"], text))
    return mails, dict(counts)


# --- near-duplicates
# --------------------------------------------------------------------------------------------


def shingles(texts: Sequence[str]) -> sparse.csr_matrix:
    """Binary matrix mails x word 5-shingles (shorter mails: the one shingle they have)."""

    def grams(text: str) -> list[str]:
        words = [w.lower() for w in WORD.findall(text)]
        return [" ".join(words[i : i + 5]) for i in range(max(1, len(words) - 4))]

    return CountVectorizer(analyzer=grams, binary=True, dtype=np.int32).fit_transform(texts).tocsr()


def overlaps(a: sparse.csr_matrix, b: sparse.csr_matrix) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """For each pair (row of a, row of b) with a shared shingle: i, j, Jaccard, share of the smaller one."""
    shared = (a @ b.T).tocoo()
    size_a = np.asarray(a.sum(1)).ravel()[shared.row]
    size_b = np.asarray(b.sum(1)).ravel()[shared.col]
    small = np.minimum(size_a, size_b)
    inside = np.where(small >= CONTAINMENT_FLOOR, shared.data / small, 0.0)
    return shared.row, shared.col, shared.data / (size_a + size_b - shared.data), inside


class Union:
    """Union-find over 0..n-1; the root of a set is its smallest member."""

    def __init__(self, n: int) -> None:
        self.parent = list(range(n))

    def find(self, i: int) -> int:
        while self.parent[i] != i:
            self.parent[i] = self.parent[self.parent[i]]
            i = self.parent[i]
        return i

    def join(self, i: int, j: int) -> None:
        a, b = sorted((self.find(i), self.find(j)))
        self.parent[b] = a


def thread_key(raw: str) -> str:
    """The subject without reply marks, tags and digits; empty when too common to mean a thread."""
    subject = raw.partition("\n")[0]
    for _ in range(3):
        subject = TAG.sub("", REPLY.sub("", subject))
    words = re.findall(r"[a-z]+", WAS.sub("", subject).lower())
    return " ".join(words) if len(words) >= 2 else ""


def cluster(mails: Sequence[Mail]) -> list[Mail]:
    """Give each mail its near-duplicate cluster and the coarser group that must stay on one side."""
    matrix = shingles([m.text for m in mails])
    i, j, jaccard, inside = overlaps(matrix, matrix)
    near = (i < j) & ((jaccard >= JACCARD) | (inside >= CONTAINMENT))
    duplicates = Union(len(mails))
    sides = Union(len(mails))
    for a, b in zip(i[near].tolist(), j[near].tolist(), strict=True):
        duplicates.join(a, b)
        sides.join(a, b)
    first: dict[str, int] = {}
    for n, mail in enumerate(mails):
        key = thread_key(mail.raw)
        if key:
            sides.join(n, first.setdefault(key, n))
    return [
        Mail(m.row, m.label, m.source, m.raw, m.text, duplicates.find(n), sides.find(n)) for n, m in enumerate(mails)
    ]


# --- split
# ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Split:
    """Held-out and validation hold one mail per cluster; training holds its clusters whole."""

    train: list[Mail]
    validation: list[Mail]
    held_out: list[Mail]
    counts: dict[str, int]


def first_of_cluster(mails: Iterable[Mail]) -> list[Mail]:
    kept: dict[int, Mail] = {}
    for mail in mails:
        kept.setdefault(mail.cluster, mail)
    return list(kept.values())


def split(mails: Sequence[Mail], seed: int) -> tuple[list[Mail], list[Mail], list[Mail]]:
    """Deal groups to held-out, validation, training, stratified by the source folder of a group's first
    mail.
    """
    groups: dict[int, list[Mail]] = defaultdict(list)
    for mail in mails:
        groups[mail.side].append(mail)
    strata: dict[str, list[list[Mail]]] = defaultdict(list)
    for key in sorted(groups):
        strata[groups[key][0].source].append(groups[key])
    train, validation, held_out = [], [], []
    rng = random.Random(seed)
    for source in sorted(strata):
        members = strata[source]
        rng.shuffle(members)
        total = sum(len({m.cluster for m in g}) for g in members)
        room = {"held": HELD_OUT * total, "val": VALIDATION * total}
        for group in members:
            kept = first_of_cluster(group)
            if len(kept) <= room["held"] + 0.5:
                room["held"] -= len(kept)
                held_out += kept
            elif len(kept) <= room["val"] + 0.5:
                room["val"] -= len(kept)
                validation += kept
            else:
                train += group
    return train, validation, held_out


def assert_disjoint(train: Sequence[Mail], held_out: Sequence[Mail]) -> float:
    """No held-out mail is a near-duplicate of a training mail; returns the highest Jaccard across the
    split.
    """
    matrix = shingles([m.text for m in (*train, *held_out)])
    _, _, jaccard, inside = overlaps(matrix[len(train) :], matrix[: len(train)])
    highest = float(jaccard.max(initial=0.0))
    assert highest < JACCARD, f"expected every Jaccard across the split below {JACCARD}, received {highest:.3f}"
    assert inside.max(initial=0.0) < CONTAINMENT, "a held-out mail lies inside a training mail"
    assert not {m.side for m in train} & {m.side for m in held_out}, "a thread lies on both sides"
    return highest


def prepare(path: Path, seed: int) -> Split:
    """Read, clean, cluster and split the data file."""
    mails, counts = load(path)
    mails = cluster(mails)
    counts["distinct"] = len(mails)
    counts["clusters"] = len({m.cluster for m in mails})
    counts["groups"] = len({m.side for m in mails})
    train, validation, held_out = split(mails, seed)
    return Split(train, validation, held_out, counts)
