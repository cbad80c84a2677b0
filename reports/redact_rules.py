"""What counts as private, as data: kinds, patterns, and the words that are never taken for a name.

A rule finds a value by its own form (a token's prefix, an address) or by what stands before it (``--api-key``, ``HOSTNAME=``,
``prompt:``). The opposite error costs too: a kernel name, a program counter, a version or a log line that is changed can change
the verdict. So every rule that could meet such text is bound to a context, and ``PROTECTED`` words stay whatever a rule says.
"""

from __future__ import annotations

import ipaddress
import re
from dataclasses import dataclass

from ..forensics.records import CLASSES

__all__ = [
    "HOST_CONTEXTS",
    "KEEPABLE",
    "KINDS",
    "PROTECTED",
    "SECRET_FORMS",
    "TEXT_KEY",
    "TOKEN_KEY",
    "USER_CONTEXTS",
    "Rule",
    "address_is_private_text",
    "is_public_host",
    "is_secret_key",
    "looks_like_version",
]

#: Kind of value -> what it is, for the redaction report. The order is that of the report.
KINDS: dict[str, str] = {
    "secrets": "tokens, keys, passwords",
    "prompts": "prompts, completions, and their token ids",
    "users": "user names, home folders, mail addresses",
    "hosts": "host, node and pod names",
    "ips": "IPv4 and IPv6 addresses",
    "macs": "hardware addresses and serial numbers",
    "hidden": "texts given with --hide",
}
#: Kinds that ``--keep`` may keep: everything but secrets and what was hidden by name.
KEEPABLE = ("prompts", "users", "hosts", "ips", "macs")


@dataclass(frozen=True, slots=True)
class Rule:
    """``pattern``'s group ``value`` is what is private. ``gate``: a chunk without any of these (lower case) is not searched."""

    name: str
    kind: str
    pattern: re.Pattern[str]
    gate: tuple[str, ...] = ()


def _rule(name: str, kind: str, pattern: str, *, gate: str = "", flags: int = 0) -> Rule:
    return Rule(name, kind, re.compile(pattern, flags), tuple(gate.split("|")) if gate else ())


_I, _M = re.IGNORECASE, re.MULTILINE
#: A value on a command line or in an environment: quoted, or up to white space, NUL or a closing sign.
_VALUE = r"(?P<value>[^\s\x00\"',;)\]}>&|]{3,4096})"

#: Secrets that show by form or by the word before them.
SECRET_FORMS: tuple[Rule, ...] = (
    _rule(
        "private key",
        "secrets",
        r"(?P<value>-----BEGIN [A-Z0-9 ]{0,40}PRIVATE KEY-----(?:[^-]|-(?!----)){0,20000}"
        r"(?:-----END [A-Z0-9 ]{0,40}PRIVATE KEY-----)?)",
        flags=re.DOTALL,
        gate="private key",
    ),
    _rule(
        "token by prefix",
        "secrets",
        r"(?<![A-Za-z0-9])(?P<value>hf_[A-Za-z0-9]{16,}|(?:sk|pk|rk)-[A-Za-z0-9_-]{16,}|gh[pousr]_[A-Za-z0-9]{20,}|github_pat_\w{20,}"
        r"|glpat-[\w-]{16,}|xox[abeoprs]-[\w-]{10,}|(?:AKIA|ASIA|AROA|AIDA)[A-Z0-9]{16}|AIza[\w-]{30,}|ya29\.[\w-]{20,}|nvapi-[\w-]{20,}"
        r"|npm_[A-Za-z0-9]{30,}|pypi-[\w-]{40,}|dckr_pat_[\w-]{20,}|dop_v1_[a-f0-9]{40,}|hvs\.[\w-]{20,}|r8_[A-Za-z0-9]{30,}"
        r"|gsk_[A-Za-z0-9]{20,}|lsv2_\w{20,}|wandb_v1_\w{20,})",
        gate="hf_|sk-|pk-|rk-|gh|glpat|xox|akia|asia|aroa|aida|aiza|ya29|nvapi|npm_|pypi-|dckr|dop_v1|hvs.|r8_|gsk_|lsv2|wandb_v1",
    ),
    _rule("JSON web token", "secrets", r"(?<![\w-])(?P<value>eyJ[\w-]{8,}\.eyJ[\w-]{4,}\.[\w-]*)", gate="eyj"),
    _rule(
        "authorization header", "secrets", r"\b(?:Bearer|Basic)\s+(?P<value>[A-Za-z0-9._~+/=-]{6,})", gate="bearer|basic", flags=_I
    ),
    _rule(
        "public key line",
        "secrets",
        r"\b(?:ssh-(?:rsa|ed25519|dss)|ecdsa-sha2-\S+)\s+(?P<value>AAAA[A-Za-z0-9+/=]{20,})",
        gate="aaaa",
    ),
    _rule(
        "password in a URL",
        "secrets",
        r"\b[A-Za-z][A-Za-z0-9+.-]{0,20}://[^\s/@:'\"]{0,200}:(?P<value>[^\s/@'\"]{1,400})@",
        gate="://",
    ),
    _rule("token in a URL", "secrets", r"\b[A-Za-z][A-Za-z0-9+.-]{0,20}://(?P<value>[A-Za-z0-9_-]{16,200})@", gate="://"),
    _rule(
        "secret in a query",
        "secrets",
        r"[?&;](?:[\w.-]{0,60}(?:token|api[_-]?key|apikey|secret|password|passwd|signature|credential)|key|sig|auth|code|pwd|sv|se)"
        r"=(?P<value>[^\s&#'\"<>]{3,})",
        flags=_I,
        gate="=",
    ),
    _rule(
        "hook URL",
        "secrets",
        r"hooks\.slack\.com/services/(?P<value>[\w/]{10,})|discord(?:app)?\.com/api/webhooks/(?P<value2>[\w/-]{10,})",
        gate="hooks.slack|discord",
    ),
    _rule(
        "argument",
        "secrets",
        r"(?<![\w-])--?(?:[\w-]{0,60}-)?(?:api-?keys?|token|password|passwd|passphrase|secret(?:-key)?|access-key(?:-id)?|private-key"
        r"|credentials?|authorization)(?:=|[\"']?[\s,\x00]+)[\"']?" + _VALUE,
        flags=_I,
        gate="key|token|pass|secret|credential|authorization",
    ),
    _rule(
        "environment variable",
        "secrets",
        r"(?<![A-Za-z0-9_])[A-Z][A-Z0-9_]{0,60}(?:TOKEN|API_?KEY|SECRET(?:_KEY)?|ACCESS_KEY(?:_ID)?|PASSWORD|PASSWD|PASSPHRASE|CREDENTIALS?"
        r"|PRIVATE_KEY|AUTH_KEY|_DSN)=[\"']?" + _VALUE,
        gate="=",
    ),
)

_SECRET_KEY = re.compile(
    r"(?:^|_)(?:api_?keys?|apikey|password|passwd|passphrase|secret|secret_key|access_key|access_key_id|secret_access_key|private_key"
    r"|client_secret|credentials?|authorization|proxy_authorization|x_api_key|set_cookie|cookie|connection_string|webhook_url)$"
    r"|^(?:auth|token|pwd|bearer)$"
    r"|(?:^|_)(?:hf|huggingface|hugging_face|hugging_face_hub|hub|github|gh|gitlab|slack|wandb|auth|access|refresh|id|bearer|api|bot|deploy"
    r"|registry|sas|csrf|jwt|session|security|vault|k8s|service_account|npm|pypi|use_auth|download|user|admin|client)_token$"
)


def is_secret_key(key: str) -> bool:
    """Whether a key of a document, a setting or a header names a secret: ``hf_token`` does, ``max_tokens`` does not."""
    return len(key) <= 80 and _SECRET_KEY.search(re.sub(r"[-. ]", "_", key.strip().lower())) is not None


#: ``prompt: '…'``, ``"prompt": "…"``, ``prompt=['…']``: what follows is somebody's text.
TEXT_KEY = re.compile(
    r"(?<![\w.])[\"']?(?P<key>prompts?|prompt_text|raw_prompt|input_text|output_text|generated_text|completions?|response_text|messages"
    r"|conversation|system_prompt|user_prompt|reasoning_content|outputs?|text|content|input)[\"']?\s*[:=]\s*(?=[\"'\[({])"
)
#: Token ids are the text in another alphabet.
TOKEN_KEY = re.compile(
    r"(?<![\w.])[\"']?(?P<key>(?:prompt|output|all|new|generated|sampled|prefill|input|spec|draft|resumed_req)?_?token_ids|input_ids"
    r"|scheduled_spec_decode_tokens)[\"']?\s*[:=]\s*(?=[\[({])"
)

_NAME = r"(?P<value>[A-Za-z0-9](?:[A-Za-z0-9_.-]{0,251}[A-Za-z0-9])?)"
#: Where a host's name stands.
HOST_CONTEXTS: tuple[Rule, ...] = (
    _rule(
        "host variable",
        "hosts",
        r"(?<![A-Za-z0-9_])(?:HOSTNAME|HOST_NAME|NODE_?NAME|SLURMD_NODENAME|SLURM_SUBMIT_HOST|SLURM_(?:JOB_)?NODELIST|POD_NAME|MY_POD_NAME"
        r"|MASTER_ADDR|MASTER_HOST|RAY_HEAD_ADDRESS|HEAD_NODE|NODE_ID)=[\"']?" + _NAME,
        gate="=",
    ),
    _rule(
        "host field",
        "hosts",
        r"[\"'](?:host_?name|host|node|node_?name|nodename|pod|pod_?name|kubernetes_node|server_?name|machine|fqdn)[\"']\s*:\s*[\"']"
        + _NAME
        + r"(?=[\"':])",
        flags=_I,
        gate="host|node|pod|server|machine|fqdn",
    ),
    _rule(
        "host label",
        "hosts",
        r"(?<![\w-])(?:instance|nodename|node|node_name|pod|pod_name|host|hostname|Hostname|kubernetes_node)=[\"']"
        + _NAME
        + r"(?=[\"':])",
        gate="=",
    ),
    _rule(
        "syslog host",
        "hosts",
        r"^(?:\w{3} +\d{1,2} \d\d:\d\d:\d\d(?:\.\d+)?|\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(?:[.,]\d+)?(?:Z|[+-]\d\d:?\d\d))\s+"
        + _NAME
        + r"(?=\s+(?:[\w./@-]+\[\d+\]|kernel|systemd|containerd|dockerd|kubelet): )",
        flags=_M,
        gate=":",
    ),
    _rule("NCCL host", "hosts", r"(?:^|[\s)\]])" + _NAME + r"(?=:\d+:\d+ \[\d+\] )", gate="nccl", flags=_M),
    _rule("node of a process", "hosts", r"\bon (?:node|host) " + _NAME + r"(?=[\s,;:)]|$)", gate="on node|on host", flags=_M),
    _rule("uname", "hosts", r"^\s*Linux " + _NAME + r"(?= \d+\.\d+)", gate="linux", flags=_M),
    _rule("pod prefix", "hosts", r"\[pod/" + _NAME + r"(?=/)", gate="[pod/"),
    _rule("shell prompt", "hosts", r"(?<![\w.])[a-z_][a-z0-9_-]{0,31}@" + _NAME + r"(?=:[~/])", gate="@"),
    _rule("remote login", "hosts", r"\b(?:ssh|scp|rsync|sftp)\s[^\n@]{0,80}@" + _NAME, gate="@"),
    _rule("mail domain", "hosts", r"(?<=[\w])@(?P<value>(?:[A-Za-z0-9][\w-]*\.){1,5}[A-Za-z]{2,24})(?![\w.-])", gate="@"),
    _rule(
        "URL host",
        "hosts",
        r"\b[A-Za-z][A-Za-z0-9+.-]{1,20}://(?:[^\s/@'\"]{0,400}@)?" + _NAME + r"(?=[:/?#\s'\",)\]]|$)",
        flags=_M,
        gate="://",
    ),
    # ``threading.local`` is Python: a label with a digit or a hyphen is asked for where the ending is an ordinary word.
    _rule(
        "private domain",
        "hosts",
        r"(?<![\w.-])(?P<value>(?:[A-Za-z0-9][A-Za-z0-9-]{0,62}\.){1,6}(?:internal|intranet|cluster\.local|amazonaws\.com)"
        r"|(?=[\w.]{0,200}[\d-])(?:[A-Za-z0-9][A-Za-z0-9-]{0,62}\.){1,6}(?:local|lan|corp|intra|home|private|svc))(?![\w(-])",
        gate=".internal|.intranet|.local|.lan|.corp|.intra|.home|.private|.svc|amazonaws",
    ),
    _rule("address as a name", "hosts", r"(?<![\w.-])(?P<value>ip(?:-\d{1,3}){4})(?![\w-])", gate="ip-"),
)
_USER = r"(?P<value>[A-Za-z_][A-Za-z0-9_.-]{0,31})"
#: Where a user's name stands.
USER_CONTEXTS: tuple[Rule, ...] = (
    _rule(
        "home folder",
        "users",
        r"/(?:home\d*|Users|export/home|mnt/home|data/home|nfs/home|lustre/home|fsx/home)/" + _USER + r"(?![\w-])",
        gate="/home|/users",
    ),
    _rule("Windows home folder", "users", r"[A-Za-z]:\\{1,2}Users\\{1,2}" + _USER, gate="users"),
    _rule(
        "user variable",
        "users",
        r"(?<![A-Za-z0-9_])(?:USER|LOGNAME|USERNAME|SUDO_USER|SLURM_JOB_USER|JUPYTERHUB_USER|NB_USER|MAIL_USER)=[\"']?" + _USER,
        gate="=",
    ),
    _rule(
        "user field",
        "users",
        r"[\"'](?:user|user_?name|owner|login|email|mail|account|uid_name)[\"']\s*:\s*[\"']" + _USER + r"(?=[\"'])",
        flags=_I,
        gate="user|owner|login|mail|account",
    ),
    # ``memcpy@GLIBC_2.14`` and ``package@1.2`` are no mail addresses.
    _rule(
        "mail address",
        "users",
        r"(?<![\w.+/-])(?P<value>[A-Za-z_][A-Za-z0-9_.+-]{0,63})@(?=(?:[A-Za-z0-9][\w-]*\.){1,5}(?!so\b)[A-Za-z]{2,24}(?![\w.-]))",
        gate="@",
    ),
    _rule(
        "shell prompt", "users", r"(?<![\w.+/-])(?P<value>[A-Za-z_][A-Za-z0-9_-]{0,31})@(?=[A-Za-z0-9][\w.-]{0,80}:[~/])", gate="@"
    ),
    _rule("remote login", "users", r"\b(?:ssh|scp|rsync|sftp)\s[^\n@]{0,80}?(?<![\w.-])" + _USER + r"(?=@)", gate="@"),
    _rule("user of a process", "users", r"\b(?:for|by|of) user " + _USER, gate="user "),
    _rule("user in a URL", "users", r"\b[A-Za-z][A-Za-z0-9+.-]{0,20}://" + _USER + r"(?=:[^\s/@'\"]{0,400}@|@)", gate="://"),
)

#: Never a private name: words that verdicts, logs and stacks are made of, and accounts that everybody has.
_PROTECTED_WORDS = """
localhost localhost.localdomain ip6-localhost host node server client worker master main head leader peer rank engine core
enginecore apiserver dpcoordinator kernel systemd root ubuntu debian centos fedora admin administrator user users test tester
nobody daemon www-data ec2-user azureuser gcp opc core vagrant docker runner github git ci build app appuser service svc vllm
sglang ray torch triton nccl cuda gpu cpu nvidia python python3 conda base none null true false info warning warn error debug
critical fatal notice trace unknown default local shared data home public guest jovyan nonroot mambauser workspace model models
linux windows darwin docs example example.com prompt completion message messages content text the a an and or of to in on at by
for with from is was not no yes all any status state running waiting idle active hang hung clean other inconclusive measured
interpreted computed inferred observed evidence graph grid block warp lane thread process pid step request requests tokens token
barrier counter arrival_counter group drain mtp producer compression dispatch disagreement graph-padding high medium low file
line read unread vmalloc slurm slurmstepd kubelet containerd dockerd
"""
PROTECTED: frozenset[str] = frozenset(_PROTECTED_WORDS.split()) | frozenset(
    word for name, (causes, outcome, _) in CLASSES.items() for word in (name, outcome, *causes)
)

_PUBLIC = (
    "github.com",
    "githubusercontent.com",
    "huggingface.co",
    "hf.co",
    "pypi.org",
    "pythonhosted.org",
    "python.org",
    "vllm.ai",
    "pytorch.org",
    "nvidia.com",
    "nvcr.io",
    "docker.io",
    "docker.com",
    "ghcr.io",
    "quay.io",
    "anaconda.org",
    "kernel.org",
    "w3.org",
    "json-schema.org",
    "apache.org",
    "openai.com",
    "example.com",
    "example.org",
    "readthedocs.io",
    "readthedocs.org",
    "opensource.org",
    "gnu.org",
    "debian.org",
    "ubuntu.com",
    "modelscope.cn",
    "google.com",
    "microsoft.com",
    "opentelemetry.io",
    "prometheus.io",
    "localhost",
)


def is_public_host(name: str) -> bool:
    """Whether a host is one that everybody knows: package indexes, documentation, the machine itself."""
    lowered = name.lower().rstrip(".")
    return any(lowered == host or lowered.endswith("." + host) for host in _PUBLIC)


_VERSION_BEFORE = re.compile(
    r"(?:==|>=|<=|~=|!=|\bv|_v|\.so\.|[A-Za-z][\w.]*[-_+]|"
    r"\b(?:versions?|ver|rev|release|build|driver|firmware|fw|vbios|bios|cudnn|nccl|tensorrt|trt|cuda|cublas|cublaslt|cufft|curand|cusolver"
    r"|cusparse|cusparselt|nvshmem|nvjitlink|nvcc|nvrtc|toolkit|runtime|torch|triton|kernel|ofed|mlnx_ofed|hpcx|ucx|openmpi|chrome|chromium"
    r"|(?:nvidia|cuda|lib|torch|python3?)[\w-]*)"
    r"(?:[\"']?\s{0,40}[:=(]?\s{0,40}[\"']?v?|\s{1,40}))$",
    re.IGNORECASE,
)
_VERSION_AFTER = re.compile(r"^(?:\+|-py\d|-\d+[_.~-]|\.post|\.dev|rc\d|\.whl|\.tar|\.x86_64|\.aarch64|\.so\b|-cp3|-cuda|~)")


def looks_like_version(text: str, start: int, end: int) -> bool:
    """Whether the four numbers at ``text[start:end]`` are a version, by what stands beside them in the same line."""
    before = text[max(start - 60, 0) : start].rpartition("\n")[2]
    if _VERSION_AFTER.match(text[end : end + 12]):
        return True
    if before.endswith("/") and not before.endswith("//") and text[end : end + 1] == "/":
        return not ipaddress.IPv4Address(text[start:end]).is_private
    return _VERSION_BEFORE.search(before) is not None


def address_is_private_text(value: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """The address, if it tells something about a network; None for loopback, any, broadcast, and text that is no address."""
    try:
        address = ipaddress.ip_address(value)
    except ValueError:
        return None
    if address.is_loopback or address.is_unspecified or value == "255.255.255.255":
        return None
    return address
