"""One tritonserver: started, waited for, ended; nothing of it outlives its keeper."""

from __future__ import annotations

import math
import shlex
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

from triton_vision.gpu import has_gpu
from triton_vision.repository import Placement, Selection, compose, read_model, select, variants
from triton_vision.server import keeper, warmup
from triton_vision.server.child import Child, surroundings
from triton_vision.server.errors import ModelLoadError, PortTakenError, ServerError, ServerStartError
from triton_vision.server.index import ServerIndex
from triton_vision.server.local import LocalIndex
from triton_vision.server.locate import Installation, find_installation
from triton_vision.server.logs import LOADING, log_flags
from triton_vision.server.outlet import Outlet
from triton_vision.server.pace import Pace, chains
from triton_vision.server.plans import ensure_plans
from triton_vision.server.ports import reachable, resolve_ports
from triton_vision.server.rundir import RunDir
from triton_vision.server.security import Security, variable
from triton_vision.server.stubs import StubWatch

# serve promises to end within 10 s: work in flight gets this long, then Triton is killed (child.KILL_AFTER_S).
EXIT_TIMEOUT_S = 4
# By so much a Python process's shared memory grows at a time. Of Triton's own step, 1 MiB, each leaves half unused, and
# docker gives a container 64 MiB.
SHM_STEP_BYTES = 256 * 1024
# Request and response objects that Triton's gRPC endpoint keeps for reuse; its own default, 8, is for few callers.
GRPC_POOL = 64
# Somebody may take a free port between its choice and its use: so often one is chosen.
PORT_TRIES = 3
# What takes longer than this is spoken of: a start (again and again), and a first photo.
SLOW_LOAD_S, SLOW_PHOTO_S = 15.0, 5.0


class TritonServer:
    """A real tritonserver on a model repository.

    ``with TritonServer(repository) as server:`` starts it and returns when every model is ready and every image
    ensemble has answered one real image; leaving ends it. ``wait`` keeps it serving meanwhile. Not for use from
    several threads, but for ``request_stop``; the thread that starts it must live as long as the server, since the
    kernel ends both together.

    Args:
        repository: a Triton model repository, anybody's. Models whose artifacts are missing are left out.
        artifacts: a directory with further artifacts, as MODEL/VERSION/FILE; TensorRT plans are built there.
        host: the address to bind: gRPC, HTTP and metrics alike.
        http_port, grpc_port, metrics_port: 0 takes any free one, and keeps it when it is started again.
        config_name: the core variant; None picks it for this machine.
        placement: on which GPUs the cores run, and for whom first; None leaves that to the configurations.
        security: TLS and tokens; None closes what changes the server or its memory, and leaves the rest open.
        log_level: one of error, warning, info, verbose.
        log: where Triton's log goes; None keeps it for error messages only.
        shm_prefix: the Python backend's shared-memory prefix; None makes one of the gRPC port.
        options: further tritonserver options, as on its command line.
        start_timeout: seconds until all models must be ready.
        warm: whether each image ensemble is sent one image before the server counts as ready.
        strict: whether one model that does not load, or one ensemble that does not answer, ends the start. Otherwise it
            is left out, with what chains it, as long as a pipeline remains.
    """

    def __init__(
        self,
        repository: str | Path,
        *,
        artifacts: str | Path | None = None,
        host: str = "127.0.0.1",
        http_port: int = 0,
        grpc_port: int = 0,
        metrics_port: int = 0,
        config_name: str | None = None,
        placement: Placement | None = None,
        security: Security | None = None,
        log_level: str = "warning",
        log: Outlet | None = None,
        shm_prefix: str | None = None,
        options: Sequence[str] = (),
        start_timeout: float = 300.0,
        warm: bool = True,
        strict: bool = False,
    ) -> None:
        self.repository = Path(repository)
        self.artifacts = Path(artifacts) if artifacts is not None else None
        self.host = host
        self._wanted = {"--http-port": http_port, "--grpc-port": grpc_port, "--metrics-port": metrics_port}
        self._config_name = config_name
        self.placement = placement
        self.security = security or Security()
        self._log_level = log_level
        self._log = log
        self._shm_prefix = shm_prefix
        self._options = list(options)
        self._start_timeout = start_timeout
        self._warm = warm
        self._strict = strict
        self.stop_requested = threading.Event()
        self._child: Child | None = None
        self._run: RunDir | None = None
        self._pace: Pace | None = None
        self._installation: Installation | None = None
        # What was chosen, and what of it has turned out to work.
        self._chosen: Selection | None = None
        self.selection: Selection | None = None
        # Where callers on this machine reach it; empty for what is off.
        self.http_address = self.grpc_address = self.metrics_address = ""
        self._local_address = ""
        self._ports: dict[str, int] = {}
        self.tokens_hidden = True
        # Seconds from the last start until it was ready.
        self.start_took = 0.0

    # -- starting -----------------------------------------------------------------------------------------------

    def prepare(self, say: Callable[[str], None] | None = None, *, build: bool = True) -> None:
        """Finds the server and reads the repository, so that ``selection`` can be told before anything starts.

        On a machine with a GPU it also builds the TensorRT plans that are missing, unless ``build`` is false, which
        takes minutes; ``say`` is told of each.

        Raises:
            SetupError: there is no server that could run here.
            RepositoryError: there is nothing to serve.
        """
        self._installation = find_installation()
        backends, gpu, refused = frozenset(self._installation.backends), has_gpu(), {}
        if gpu and self._config_name is None and "tensorrt" in backends and self.repository.is_dir():
            refused = ensure_plans(
                self.repository, self.artifacts, self.stop_requested, say or (lambda _: None), build=build
            )
        self._chosen = self.selection = select(
            self.repository, self._config_name, backends=backends, gpu=gpu, artifacts=self.artifacts, refused=refused
        )

    def command(self, run: Path, ports: dict[str, int], prefix: str) -> list[str]:
        """tritonserver's command line but for secrets, with its folder ``run`` filled: links, fitted configurations."""
        assert self._installation is not None
        assert self.selection is not None
        command = [
            str(self._installation.binary),
            f"--model-repository={compose(self.selection, run / 'models', self.placement)}",
            f"--backend-directory={self._installation.link_backends(run)}",
            f"--backend-config=python,shm-region-prefix-name={prefix}",
            f"--backend-config=python,shm-growth-byte-size={SHM_STEP_BYTES}",
            *(f"{option}={port}" for option, port in ports.items()),
            *(f"--{endpoint}-address={host}" for endpoint, host in self.security.hosts(self.host).items()),
            *self.security.options(),
            # All of the folder's models at the start, and afterwards those that the keeper, or who has the admin
            # token, loads anew.
            "--model-control-mode=explicit",
            "--load-model=*",
            # A model that fails is reported by name and reason, not by a server that is simply gone.
            "--exit-on-error=false",
            f"--exit-timeout-secs={EXIT_TIMEOUT_S}",
            f"--grpc-infer-allocation-pool-size={GRPC_POOL}",
            *log_flags(self._log_level),
        ]
        if self.selection.config_name:
            command.append(f"--model-config-name={self.selection.config_name}")
        if self.placement is not None:
            command += self.placement.options()
        elif not has_gpu():
            command.append("--pinned-memory-pool-byte-size=0")
        if not has_gpu():
            command.append("--allow-gpu-metrics=false")
        return command + self._options

    def describe(self) -> str:
        """tritonserver's command line, and every configuration that differs from the repository's; starts nothing."""
        if self.selection is None:
            self.prepare(build=False)
        assert self.selection is not None
        with tempfile.TemporaryDirectory(prefix="triton-vision-") as folder:
            command = self.command(Path(folder), self._wanted, self._shm_prefix or "triton_vision_")
            lines = [shlex.join([*command, *self.security.masked()]).replace(folder, "RUN")]
            for name, model in self.selection.served.items():
                file = Path(folder, "models", name, model.config_file)
                if model.config_file and file.read_bytes() != (model.path / model.config_file).read_bytes():
                    lines += [f"# {name}/{model.config_file}", file.read_text(encoding="utf-8").strip()]
            # What it would be where the server has the backend for it.
            placement = self.placement or Placement()
            for name in self.selection.left_out:
                for variant in (None, *variants(self.repository / name)):
                    model = read_model(self.repository / name, variant)
                    placed = placement.place(model)
                    if placed is not model:
                        lines += [f"# {name}/{model.config_file}, not served here", str(placed.config).strip()]
        return "\n".join(lines)

    def start(self) -> TritonServer:
        """Starts the server and waits until it serves.

        A model that turns out to be broken takes down its own pipeline only: Triton is started again without it.

        Raises:
            SetupError, RepositoryError: before anything is started.
            ServerStartError, ModelLoadError: after; the server has been ended again.
        """
        if self._chosen is None:
            self.prepare()
        self.selection = self._chosen
        tries = PORT_TRIES if not self._ports and 0 in self._wanted.values() else 1
        while True:
            assert self.selection is not None
            try:
                self._start(self.selection)
            except PortTakenError:
                tries -= 1
                if not tries:
                    raise
                self._ports = {}
            except ModelLoadError as error:
                rest = self.selection.without(error.sentences)
                # A process that dies at once leaves no name of its model, so nothing can be left out for it.
                unnamed = len(rest.served) == len(self.selection.served)
                if self._strict or unnamed or not rest.served_pipelines():
                    raise
                self.selection = rest
            else:
                return self

    def _start(self, selection: Selection) -> None:
        assert self._installation is not None
        hosts, security = self.security.hosts(self.host), self.security
        # An endpoint that serves nobody takes nobody's port.
        wanted = self._ports or {**self._wanted, **({} if security.http else {"--http-port": 0})}
        elsewhere = {f"--{endpoint}-port": host for endpoint, host in hosts.items()}
        ports = self._ports = resolve_ports(self.host, wanted, elsewhere)
        prefix = self._shm_prefix or f"triton_vision_{ports['--grpc-port']}_"
        self._local_address = reachable(hosts["http"], ports["--http-port"])
        self.http_address = self._local_address if security.http else ""
        self.grpc_address = reachable(self.host, ports["--grpc-port"])
        self.metrics_address = reachable(hosts["metrics"], ports["--metrics-port"]) if security.metrics else ""
        self._run = RunDir(prefix)
        began = time.monotonic()
        try:
            self._pace = Pace(chains(selection.served), self._run.path)
            self._child = self._spawn(self._installation, ports, self._run)
            self.tokens_hidden = self._child.hidden
            self._wait_ready(self._child, selection)
            if self._warm:
                self._send_one_image(selection)
            # Triton goes on without an HTTP or metrics endpoint whose port somebody took after it was chosen.
            if self._child.log.taken_port():
                raise PortTakenError(self._child.log.taken_port())
            self._pace.start(self.metrics_address)
            self.start_took = time.monotonic() - began
        except BaseException:
            self.stop()
            raise

    def _spawn(self, installation: Installation, ports: dict[str, int], run: RunDir) -> Child:
        command = self.command(run.path, ports, run.prefix)
        environment = {**surroundings(run.path), **installation.environment(run.path)}
        for role in self.security.tokens:
            environment.pop(variable(role), None)  # no business of a model's
        put = self._pass_on if self._log is not None else None
        return Child(command, self.security.secrets(), environment, run, put)

    def _pass_on(self, line: str) -> None:
        assert self._log is not None
        if self._log_level in ("info", "verbose") or LOADING.search(line) is None:
            self._log.put(line)

    def _wait_ready(self, child: Child, selection: Selection) -> None:
        """Waits until Triton answers, then asks it which models are ready.

        Triton opens its ports when every model has been loaded or has failed.
        """
        began = late = time.monotonic()
        deadline = began + self._start_timeout
        stubs = StubWatch(child.pid)
        with self.index() as index:
            while not index.live(timeout=0.1):
                self._check_alive()
                dead = stubs.dead_model()
                if dead:
                    raise ModelLoadError({dead: "its Python process died while loading it"})
                if self.stop_requested.is_set():
                    raise ServerStartError("ended before it was ready")
                if time.monotonic() > deadline:
                    raise ServerStartError(f"Triton was not ready within {self._start_timeout:g} s")
                if time.monotonic() > late + SLOW_LOAD_S and self._log is not None:
                    late = time.monotonic()
                    self._log.put(f"waiting: Triton has been loading the models for {late - began:.0f} s\n")
            broken = index.broken()
        if self.security.tls is not None:
            self.security.tls.seen_at(self.grpc_address)
        if broken:
            known = {name: why or child.log.error_about(name) for name, why in selection.causes(broken).items()}
            # What only fails because another model does, has no reason of its own to tell.
            told = {name: why for name, why in known.items() if why}
            raise ModelLoadError(told or dict.fromkeys(broken, "Triton gives no reason"))

    def index(self) -> ServerIndex | LocalIndex:
        """A connection for questions that only the keeper may ask."""
        headers = self.security.headers()
        if self.security.asks_over_http:
            return LocalIndex(self._local_address, headers)
        return ServerIndex(self.grpc_address, headers)

    def _check_alive(self) -> None:
        assert self._child is not None
        ended = self._child.ended()
        if ended:
            self._child.log.join(2.0)
            kind = PortTakenError if self._child.log.taken_port() else ServerStartError
            raise kind(f"{ended}: {self._child.log.last_error() or 'it said no reason'}")

    def _send_one_image(self, selection: Selection) -> None:
        """In a thread of its own, so that a stop is obeyed, and a crash noticed, while a model takes its time."""
        errors: list[ServerError] = []
        asked: list[str] = []
        headers = self.security.headers()

        def send() -> None:
            try:
                for ensemble in selection.image_ensembles():
                    asked.append(ensemble)
                    folder = selection.served[ensemble].path
                    if self.security.asks_over_http:
                        LocalIndex(self._local_address, headers).classify_once(ensemble, folder=folder)
                    else:
                        warmup.classify_once(self.grpc_address, ensemble, headers=headers, folder=folder)
            except ServerError as error:
                errors.append(error)

        thread = threading.Thread(target=send, name="first-image", daemon=True)
        thread.start()
        late = time.monotonic() + SLOW_PHOTO_S
        while thread.is_alive():
            thread.join(0.05)
            if time.monotonic() > late and self._log is not None:
                self._log.put(f"waiting: {asked[-1]} has not answered its first photo yet\n")
                late = math.inf
            self._check_alive()
            if self.stop_requested.is_set():
                raise ServerStartError("ended before it was ready")
        if errors:
            raise errors[0]

    # -- running ------------------------------------------------------------------------------------------------

    @property
    def pid(self) -> int:
        """tritonserver's process id, which is also its process group; another one after each start."""
        assert self._child is not None, "the server has not been started"
        return self._child.pid

    @property
    def folder(self) -> Path:
        """The run-time folder."""
        assert self._run is not None, "the server has not been started"
        return self._run.path

    def ended(self) -> str:
        """How tritonserver ended by itself, in words; empty while it runs."""
        assert self._child is not None, "the server has not been started"
        return self._child.ended()

    def request_stop(self) -> None:
        """Ends ``wait`` and a start in progress; safe in a signal handler and from other threads."""
        self.stop_requested.set()

    def wait(self, tell: Callable[[str], None] | None = None, ready: Callable[[], None] | None = None) -> None:
        """Keeps the server serving (``keeper.keep``) until a stop is requested.

        Args:
            tell: takes a line about what went wrong and what is done about it.
            ready: called when the server is ready again after a restart.

        Raises:
            ServerStartError: it failed too often in a row; the message says how.
        """
        keeper.keep(self, tell or (lambda _: None), ready or (lambda: None))

    # -- ending -------------------------------------------------------------------------------------------------

    def stop(self) -> None:
        """Ends the server within 10 s and clears what it used. Idempotent."""
        if self._pace is not None:
            self._pace.stop()
            self._pace = None
        if self._child is not None:
            self._child.end()
            self._child = None
        if self._run is not None:
            self._run.close()
            self._run = None

    def __enter__(self) -> TritonServer:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()
