//! Finds the node's container runtimes and keeps checking for them.
//!
//! In:  the paths where sockets may be, events of their directories.
//! Out: [`Runtimes`]: those that answered, by name, and the state of each path as text.
//!
//! A socket that is missing, hangs or belongs to no runtime is a reported state, not an error that ends the process: it
//! is checked again when its directory changes, and at growing intervals if there is no event (a socket that exists and
//! does not answer). A runtime that has answered once is kept while it restarts; its client reconnects.

mod inotify;
#[cfg(test)]
mod tests;

use std::os::unix::fs::FileTypeExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use futures::future::join_all;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use self::inotify::DirectoryWatcher;
use super::client::CriClient;
use super::{Error, Runtime, Version};
use kruise_api::backoff::Backoff;
use kruise_ops::Progress;

/// Where the DaemonSet mounts the host's `/var/run`.
const HOST_RUN: &str = "/hostvarrun";
/// In upstream's order.
const KNOWN_SOCKETS: [&str; 7] = [
    "containerd.sock",
    "containerd/containerd.sock",
    "crio.sock",
    "crio/crio.sock",
    "cri-dockerd.sock",
    "cri-dockerd/cri-dockerd.sock",
    "k3s/containerd/containerd.sock",
];
/// A socket exists a moment before a process listens on it.
const PROBE_BACKOFF: Backoff = Backoff::new(Duration::from_millis(100), Duration::from_secs(15));
/// There is no event when a runtime hangs, or when a directory is mounted.
const PROBE_INTERVAL: Duration = Duration::from_secs(15);
/// Longest check of all sockets: some calls to each, all sockets concurrently.
const PROBE_TIMEOUT: Duration = Duration::from_secs(60);

/// Where to look for sockets.
#[derive(Debug, Clone)]
pub struct DiscoveryOptions {
    /// The directory that holds the host's sockets.
    pub root: PathBuf,
    /// The only socket to use, absolute or relative to `root`; `None` means the known paths.
    pub socket_file: Option<PathBuf>,
}

impl DiscoveryOptions {
    /// `/hostvarrun`, or `/run` if that is not mounted, as for a process on the host itself.
    pub fn new(socket_file: Option<PathBuf>) -> Self {
        let mounted = Path::new(HOST_RUN);
        let root = if mounted.is_dir() {
            mounted
        } else {
            Path::new("/run")
        };
        Self {
            root: root.to_owned(),
            socket_file,
        }
    }

    /// The sockets to try, best first.
    pub fn candidates(&self) -> Vec<PathBuf> {
        match &self.socket_file {
            Some(file) => {
                let file = file
                    .to_str()
                    .and_then(|f| f.strip_prefix("unix://"))
                    .map_or(file.as_path(), Path::new);
                vec![self.root.join(file)]
            }
            None => KNOWN_SOCKETS.iter().map(|known| self.root.join(known)).collect(),
        }
    }
}

/// The state of one socket, for health responses and the control API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SocketHealth {
    /// The expected path of the socket.
    pub socket: PathBuf,
    /// The runtime that answered last, if any did.
    pub version: Option<Version>,
    /// Whether the path was checked since the start.
    pub checked: bool,
    /// Whether a socket exists at that path.
    pub present: bool,
    /// Whether the last call was answered.
    pub healthy: bool,
    /// The state as text.
    pub message: String,
}

impl SocketHealth {
    /// Whether a runtime is or ever was at that path: otherwise a known path is of no interest.
    #[must_use]
    pub fn was_found(&self) -> bool {
        self.present || self.version.is_some()
    }
}

/// Why no runtime answers, as text.
#[must_use]
pub fn no_runtime_reason(sockets: &[SocketHealth]) -> String {
    let (found, missing): (Vec<_>, Vec<_>) = sockets.iter().partition(|s| s.was_found());
    let mut messages: Vec<String> = found.iter().map(|s| s.message.clone()).collect();
    if !missing.is_empty() {
        let paths: Vec<_> = missing.iter().map(|s| s.socket.display().to_string()).collect();
        messages.push(format!("no socket at {}", paths.join(", ")));
    }
    messages.join("; ")
}

/// The node's container runtimes. Clones share one state.
#[derive(Clone)]
pub struct Runtimes {
    shared: Arc<SharedSlots>,
}

struct SharedSlots {
    slots: RwLock<Vec<SocketSlot>>,
    /// Name of the runtime that kubelet starts containers with; none before a Pod has shown it.
    of_kubelet: RwLock<Option<Box<str>>>,
    changed: watch::Sender<u64>,
}

#[derive(Clone)]
struct SocketSlot {
    health: SocketHealth,
    runtime: Option<Arc<dyn Runtime>>,
    failures: u32,
    next_probe: Option<Instant>,
}

impl SocketSlot {
    fn new(socket: PathBuf) -> Self {
        let message = format!("{} has not been checked yet", socket.display());
        let health = SocketHealth {
            socket,
            version: None,
            checked: false,
            present: false,
            healthy: false,
            message,
        };
        Self {
            health,
            runtime: None,
            failures: 0,
            next_probe: None,
        }
    }
}

#[cfg(any(test, feature = "testing"))]
impl Runtimes {
    /// One runtime that has answered, and is not checked again.
    pub fn from_runtime(runtime: impl Runtime) -> Self {
        let mut slot = SocketSlot::new(runtime.socket().to_owned());
        slot.health.healthy = true;
        slot.runtime = Some(Arc::new(runtime));
        Self {
            shared: Arc::new(SharedSlots {
                slots: RwLock::new(vec![slot]),
                of_kubelet: RwLock::default(),
                changed: watch::channel(0).0,
            }),
        }
    }
}

impl Runtimes {
    /// Nothing is probed before [`Runtimes::run`] or [`Runtimes::probe_all`].
    pub fn new(options: &DiscoveryOptions) -> Self {
        let slots = options.candidates().into_iter().map(SocketSlot::new).collect();
        Self {
            shared: Arc::new(SharedSlots {
                slots: RwLock::new(slots),
                of_kubelet: RwLock::default(),
                changed: watch::channel(0).0,
            }),
        }
    }

    /// A container of a Pod runs in the runtime of that name, the scheme of its `containerID`.
    pub fn set_kubelet_runtime(&self, name: &str) {
        let known = &self.shared.of_kubelet;
        if known.read().unwrap_or_else(PoisonError::into_inner).as_deref() == Some(name) {
            return;
        }
        tracing::info!(runtime = name, "kubelet uses this container runtime");
        *known.write().unwrap_or_else(PoisonError::into_inner) = Some(name.into());
    }

    /// The runtime for calls that concern no container, such as pulls: that of kubelet, also while it does not answer,
    /// because images elsewhere are of no use. Before it is known, or if it has no socket here: the first in order that
    /// answers, else the first that ever did.
    pub fn preferred(&self) -> Option<Arc<dyn Runtime>> {
        let of_kubelet = self
            .shared
            .of_kubelet
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone();
        if let Some(runtime) = of_kubelet.and_then(|name| self.by_name(&name)) {
            return Some(runtime);
        }
        let slots = self.slots();
        let with_runtime = || slots.iter().filter(|s| s.runtime.is_some());
        with_runtime()
            .find(|s| s.health.healthy)
            .or_else(|| with_runtime().next())
            .and_then(|s| s.runtime.clone())
    }

    /// The runtime of that name, the scheme of a `containerID`.
    pub fn by_name(&self, name: &str) -> Option<Arc<dyn Runtime>> {
        let slots = self.slots();
        let matching = || {
            slots
                .iter()
                .filter(|s| s.runtime.as_ref().is_some_and(|r| r.name() == name))
        };
        matching()
            .find(|s| s.health.healthy)
            .or_else(|| matching().next())
            .and_then(|s| s.runtime.clone())
    }

    /// The state of every socket, best first.
    pub fn health(&self) -> Vec<SocketHealth> {
        self.slots().into_iter().map(|s| s.health).collect()
    }

    /// A receiver that changes with the state of any socket.
    pub fn subscribe(&self) -> watch::Receiver<u64> {
        self.shared.changed.subscribe()
    }

    /// Checks all sockets once, concurrently.
    pub async fn probe_all(&self) {
        self.probe_where(|_| true).await;
    }

    /// Checks for runtimes until shutdown.
    pub async fn run(&self, shutdown: CancellationToken, progress: &Progress) {
        let step = progress.begin_idle("runtimes");
        let sockets: Vec<PathBuf> = self.health().into_iter().map(|h| h.socket).collect();
        let mut directories = DirectoryWatcher::watch(&sockets);
        let mut probe_every = true;
        while !shutdown.is_cancelled() {
            let now = Instant::now();
            step.set_activity("looking at the runtimes' sockets", PROBE_TIMEOUT);
            tokio::select! {
                () = self.probe_where(|slot| probe_every || slot.next_probe.is_none_or(|due| due <= now)) => (),
                () = shutdown.cancelled() => return,
            }
            let next = self
                .slots()
                .iter()
                .filter_map(|s| s.next_probe)
                .min()
                .unwrap_or(now + PROBE_INTERVAL);
            step.set_idle(Some(next.saturating_duration_since(Instant::now())));
            probe_every = tokio::select! {
                () = directories.changed() => true,
                () = tokio::time::sleep_until(next) => false,
                () = shutdown.cancelled() => return,
            };
        }
    }

    /// Checks some sockets concurrently; each result is applied at once, without waiting for the others.
    async fn probe_where(&self, filter: impl Fn(&SocketSlot) -> bool) {
        let selected = self
            .slots()
            .into_iter()
            .enumerate()
            .filter(|(_, slot)| filter(slot));
        join_all(selected.map(|(index, slot)| async move { self.update_slot(index, probe(slot).await) }))
            .await;
    }

    fn update_slot(&self, index: usize, probed: SocketSlot) {
        let mut slots = self.shared.slots.write().unwrap_or_else(PoisonError::into_inner);
        let Some(slot) = slots.get_mut(index) else { return };
        let changed = slot.health != probed.health;
        *slot = probed;
        if changed {
            let SocketHealth {
                socket,
                healthy,
                message: words,
                ..
            } = &slot.health;
            if slot.health.was_found() {
                tracing::info!(socket = %socket.display(), healthy, "{words}");
            } else {
                tracing::debug!(socket = %socket.display(), "{words}");
            }
            drop(slots);
            self.shared.changed.send_modify(|n| *n = n.wrapping_add(1));
        }
    }

    fn slots(&self) -> Vec<SocketSlot> {
        self.shared
            .slots
            .read()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }
}

/// One check of one socket.
async fn probe(mut slot: SocketSlot) -> SocketSlot {
    let now = Instant::now();
    slot.health.checked = true;
    if let Some(words) = missing_reason(&slot.health.socket).await {
        slot.health.present = false;
        slot.health.healthy = false;
        slot.health.message = words;
        slot.next_probe = Some(now + PROBE_INTERVAL);
        return slot;
    }
    slot.health.present = true;
    match connect(&slot).await {
        Ok((runtime, version)) => {
            slot.health.message = format!(
                "{} {} answers at {}",
                version.runtime_name,
                version.runtime_version,
                slot.health.socket.display()
            );
            slot.health.healthy = true;
            slot.health.version = Some(version);
            slot.runtime = Some(runtime);
            slot.failures = 0;
            slot.next_probe = Some(Instant::now() + PROBE_INTERVAL);
        }
        Err(error) => {
            slot.health.message = error.to_string();
            slot.health.healthy = false;
            slot.next_probe = Some(Instant::now() + PROBE_BACKOFF.delay(slot.failures));
            slot.failures = slot.failures.saturating_add(1);
        }
    }
    slot
}

/// Calls the cached runtime; connects again if there is none or its name has changed.
async fn connect(slot: &SocketSlot) -> Result<(Arc<dyn Runtime>, Version), Error> {
    if let Some(runtime) = &slot.runtime {
        let version = runtime.version().await?;
        if version.runtime_name == runtime.name() {
            return Ok((Arc::clone(runtime), version));
        }
    }
    let (client, version) = CriClient::connect(&slot.health.socket).await?;
    Ok((Arc::new(client), version))
}

/// Why there can be no runtime at `path`, as text.
async fn missing_reason(path: &Path) -> Option<String> {
    let shown = path.display();
    match tokio::fs::metadata(path).await {
        Ok(file) if file.file_type().is_socket() => None,
        Ok(_) => Some(format!("{shown} is not a socket")),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Some(format!(
            "there is no socket at {shown}; it is used as soon as it appears"
        )),
        Err(e) => Some(format!("cannot check {shown}: {e}")),
    }
}
