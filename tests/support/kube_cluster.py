"""A real Kubernetes API server with etcd on loopback, and controllers where a test asks for them.

`python tests/support/kube_cluster.py` builds the four programs with Go (half an hour, 3 GB of cache), unless an archive
of them lies beside the checkout.
"""

from __future__ import annotations

import json
import os
import ssl
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
from pathlib import Path
from typing import Any, ClassVar, Final

import yaml
from doll.errors import ServiceUnavailableError
from doll.local import processes
from doll.local.kafka_jars import CACHE_ENV
from doll.process.platform import lock_exclusively
from paths import SHARED_ENGINES
from waiting import until

VERSION: Final = "1.36.3"
TOKEN: Final = "admin-of-a-test"
_PROGRAMS: Final = ("kube-apiserver", "kube-controller-manager", "kube-scheduler")
_ARCHIVE: Final = SHARED_ENGINES / "kube-bin.tar.xz"
_STAGING: Final = (
    "api", "apiextensions-apiserver", "apimachinery", "apiserver", "cli-runtime", "client-go", "cloud-provider",
    "cluster-bootstrap", "code-generator", "component-base", "component-helpers", "controller-manager", "cri-api",
    "cri-client", "csi-translation-lib", "dynamic-resource-allocation", "endpointslice", "externaljwt", "kms",
    "kube-aggregator", "kube-controller-manager", "kube-proxy", "kube-scheduler", "kubectl", "kubelet", "metrics",
    "mount-utils", "pod-security-admission", "sample-apiserver", "sample-cli-plugin", "sample-controller",
)  # fmt: skip


def folder() -> Path:
    """Where the programs are kept, which may not exist yet."""
    root = os.environ.get(CACHE_ENV)
    return (Path(root) if root else Path.home() / ".cache" / "doll") / f"kubernetes-{VERSION}"


def unavailable_reason() -> str | None:
    """None if a cluster can be started here; else what is missing."""
    if folder().is_dir() or _ARCHIVE.is_file():
        return None
    return f"Kubernetes {VERSION} is not in {folder()}: python tests/support/kube_cluster.py builds it (half an hour)"


def _unpacked() -> Path:
    """The folder of the programs; two that unpack at once do not meet."""
    target = folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.with_suffix(".lock").open("w") as lock:
        lock_exclusively(lock.fileno())
        if not target.is_dir():
            with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
                with tarfile.open(_ARCHIVE) as tar:
                    tar.extractall(temporary, filter="data")
                try:
                    (Path(temporary) / "bin").rename(target)
                except OSError:
                    if not target.is_dir():
                        raise  # else another program has unpacked it meanwhile
    return target


def build() -> None:
    """Build the programs from the Go proxy."""
    staging = f"0.{VERSION.split('.', 1)[1]}"
    replaced = "\n".join(f"  k8s.io/{name} => k8s.io/{name} v{staging}" for name in _STAGING)
    target = folder()
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as temporary:
        work = Path(temporary)
        (work / "go.mod").write_text(
            f"module kube\ngo 1.26.0\nrequire (\n  k8s.io/kubernetes v{VERSION}\n"
            "  go.etcd.io/etcd/server/v3 v3.6.15\n)\n"
            f"replace (\n{replaced}\n)\n"
        )
        packages = [*(f"k8s.io/kubernetes/cmd/{name}" for name in _PROGRAMS), "go.etcd.io/etcd/server/v3"]
        imports = "\n".join(f'  _ "{package}"' for package in packages)
        (work / "tools.go").write_text(f"//go:build tools\n\npackage tools\n\nimport (\n{imports}\n)\n")
        env = {**os.environ, "GOFLAGS": "-mod=mod -trimpath", "CGO_ENABLED": "0"}
        major_minor = VERSION.split(".")
        stamp = "k8s.io/component-base/version."
        flags = (
            f"-s -w -X {stamp}gitVersion=v{VERSION} -X {stamp}gitMajor={major_minor[0]} "
            f"-X {stamp}gitMinor={major_minor[1]}"
        )
        for name, package in zip((*_PROGRAMS, "etcd"), packages, strict=True):
            command = ["go", "build", "-ldflags", flags, "-o", f"bin/{name}", package]
            subprocess.run(command, check=True, cwd=work, env=env)
        (work / "bin").rename(target)


class _Program(processes.LocalServer):
    _grace_s: ClassVar[float] = 5.0

    def __init__(self, work: Path, name: str, arguments: list[str]) -> None:
        super().__init__(work / f"{name}.log")
        self._argv = [str(_unpacked() / name), *arguments]

    def start(self) -> None:
        self._process = processes.spawn(self._argv, self.log_path)


class KubeCluster(processes.Server):
    """etcd and an API server with RBAC; `kubeconfig` is an administrator's.

    Args:
        controllers: with controller-manager and scheduler, which watch nodes and collect pods.
    """

    def __init__(self, work: Path, *, controllers: bool = False) -> None:
        work.mkdir(parents=True, exist_ok=True)
        self._work = work
        etcd, peer, self._port = (processes.free_port() for _ in range(3))
        self.url = f"https://{processes.LOOPBACK}:{self._port}"
        self.kubeconfig = work / "kubeconfig"
        self._certificate = work / "certs" / "apiserver.crt"  # which the API server makes for itself
        self._write_keys()
        local = f"http://{processes.LOOPBACK}"
        own = [f"--kubeconfig={self.kubeconfig}", "--leader-elect=false", f"--bind-address={processes.LOOPBACK}"]
        self._programs = [
            _Program(work, "etcd", [
                "--data-dir", str(work / "etcd"), "--unsafe-no-fsync", "--listen-client-urls", f"{local}:{etcd}",
                "--advertise-client-urls", f"{local}:{etcd}", "--listen-peer-urls", f"{local}:{peer}",
                "--initial-advertise-peer-urls", f"{local}:{peer}", "--initial-cluster", f"default={local}:{peer}",
            ]),
            _Program(work, "kube-apiserver", [
                f"--etcd-servers={local}:{etcd}", f"--bind-address={processes.LOOPBACK}",
                f"--advertise-address={processes.LOOPBACK}", f"--secure-port={self._port}", f"--cert-dir={work}/certs",
                f"--token-auth-file={work}/tokens.csv", "--service-account-issuer=https://kubernetes.default.svc",
                f"--service-account-key-file={work}/key.pub", f"--service-account-signing-key-file={work}/key",
                "--service-cluster-ip-range=10.0.0.0/24", "--authorization-mode=RBAC",
                "--disable-admission-plugins=ServiceAccount", "--event-ttl=10m",
            ]),
        ]  # fmt: skip
        if controllers:
            key = f"--service-account-private-key-file={work}/key"
            self._programs += [
                _Program(
                    work, name, [*own, *more, f"--secure-port={processes.free_port()}", f"--cert-dir={work}/certs"]
                )
                for name, more in (("kube-controller-manager", [key]), ("kube-scheduler", []))
            ]

    def start(self) -> None:
        for program in self._programs[:2]:
            program.start()
        api = self._programs[1]
        until(lambda: api.pid is None or self._is_ready(), lambda: processes.tail(api.log_path))
        if api.pid is None:
            raise ServiceUnavailableError(f"the API server does not start:\n{processes.tail(api.log_path)}")
        for program in self._programs[2:]:
            program.start()

    def stop(self) -> None:
        for program in reversed(self._programs):
            program.stop()

    def user(self, name: str) -> Path:
        """A kubeconfig of a user who may do nothing until a role is bound to them."""
        path = self._work / f"kubeconfig-{name}"
        path.write_text(self._config_of(f"token-of-{name}"))
        return path

    def _write_keys(self) -> None:
        from cryptography.hazmat.primitives import serialization
        from cryptography.hazmat.primitives.asymmetric import rsa

        key = rsa.generate_private_key(65537, 2048)
        plain, pem = serialization.NoEncryption(), serialization.Encoding.PEM
        (self._work / "key").write_bytes(key.private_bytes(pem, serialization.PrivateFormat.TraditionalOpenSSL, plain))
        public = key.public_key().public_bytes(pem, serialization.PublicFormat.SubjectPublicKeyInfo)
        (self._work / "key.pub").write_bytes(public)
        (self._work / "tokens.csv").write_text(
            f'{TOKEN},admin,admin,"system:masters"\ntoken-of-provisioner,provisioner,provisioner\n'
        )
        self.kubeconfig.write_text(self._config_of(TOKEN))

    def _config_of(self, token: str) -> str:
        server = {"server": self.url, "certificate-authority": str(self._certificate)}
        return yaml.safe_dump({
            "apiVersion": "v1", "kind": "Config", "current-context": "test",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": "test", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
        })  # fmt: skip

    def _is_ready(self) -> bool:
        try:
            return bool(self.call("GET", "/readyz") == "ok")
        except OSError:
            return False

    def kill(self) -> None:
        for program in reversed(self._programs):
            program.kill()

    def call(self, method: str, path: str, body: Any = None, kind: str = "application/json") -> Any:
        """A call as administrator; the answer's JSON, or its text."""
        request = urllib.request.Request(
            self.url + path, None if body is None else json.dumps(body).encode(), method=method,
            headers={"Authorization": f"Bearer {TOKEN}", "Content-Type": kind},
        )  # fmt: skip
        context = ssl.create_default_context(cafile=str(self._certificate))
        with urllib.request.urlopen(request, timeout=30, context=context) as response:
            text = response.read().decode()
        return json.loads(text) if text.startswith("{") else text


if __name__ == "__main__":
    build()
    sys.stdout.write(f"{folder()}\n")
