//! A fault-injecting container runtime: CRI v1 on a real unix socket that hangs, dies, delays and returns wrong data on
//! demand.
//!
//! It keeps images and containers in memory, so that working and failing methods can be tested together.

mod serve;
mod state;

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use tokio::net::UnixListener;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

pub use state::{FakeContainer, State};

/// What a method does instead of its work.
#[derive(Debug, Clone)]
pub enum Fault {
    /// Never answers.
    Hang,
    /// Answers once the fault is cleared.
    Blocked,
    /// Closes the connection once it has received the call.
    Disconnect,
    /// Answers after that long.
    Slow(Duration),
    /// Answers with that many bytes of padding added.
    Oversize(usize),
    /// Returns `Unimplemented`.
    Unimplemented,
    /// Answers with bytes that are no message.
    Garbage,
    /// Answers with a gRPC status.
    Status(tonic::Code, String),
}

/// The server. Stops when dropped.
pub struct FaultCri {
    path: PathBuf,
    shared: Arc<Mutex<State>>,
    tasks: Option<ServerTasks>,
}

/// Waits until `predicate` holds.
async fn wait_until(shared: &Mutex<State>, predicate: impl Fn(&State) -> bool) {
    let changed = Arc::clone(&shared.lock().unwrap().changed);
    loop {
        let notified = changed.notified();
        tokio::pin!(notified);
        notified.as_mut().enable();
        if predicate(&shared.lock().unwrap()) {
            return;
        }
        notified.await;
    }
}

/// The server in a folder of its own.
pub struct FaultCriFixture {
    pub dir: tempfile::TempDir,
    pub server: FaultCri,
}

impl FaultCriFixture {
    pub fn start() -> Self {
        let dir = tempfile::tempdir().unwrap();
        let server = FaultCri::start(&dir.path().join("containerd.sock"));
        Self { dir, server }
    }

    pub fn socket(&self) -> PathBuf {
        self.server.path.clone()
    }
}

struct ServerTasks {
    accept: JoinHandle<()>,
    connections: CancellationToken,
    tracker: TaskTracker,
}

impl FaultCri {
    /// Listens at `path`.
    pub fn start(path: &Path) -> Self {
        let mut server = Self {
            path: path.to_owned(),
            shared: Arc::default(),
            tasks: None,
        };
        server.listen();
        server
    }

    /// Its state; lock it only briefly.
    pub fn state(&self) -> MutexGuard<'_, State> {
        self.shared.lock().unwrap()
    }

    /// Makes a method fail from now on: `PullImage`, `Version` and so on.
    pub fn inject_fault(&self, method: &str, fault: Fault) {
        self.state().faults.insert(method.to_owned(), fault);
    }

    /// Makes a method work again.
    pub fn clear_fault(&self, method: &str) {
        let mut state = self.state();
        state.faults.remove(method);
        state.changed.notify_waiters();
    }

    /// How often a method was called.
    pub fn calls(&self, method: &str) -> usize {
        self.state().calls.get(method).copied().unwrap_or(0)
    }

    /// Waits until `predicate` holds; on timeout, prints `what`.
    pub async fn wait_until(&self, what: &str, predicate: impl Fn(&State) -> bool) {
        let result =
            tokio::time::timeout(super::waits::WAIT_TIMEOUT, wait_until(&self.shared, predicate)).await;
        assert!(
            result.is_ok(),
            "the runtime still had not seen: {what}; it is {:?}",
            self.state()
        );
    }

    /// Closes every connection and stops listening; its state is kept.
    pub async fn kill(&mut self) {
        self.crash().await;
        let _ = std::fs::remove_file(&self.path);
    }

    /// The same, but leaves the socket's file behind, as a killed process does.
    pub async fn crash(&mut self) {
        let Some(serving) = self.tasks.take() else {
            return;
        };
        serving.accept.abort();
        serving.connections.cancel();
        serving.tracker.close();
        serving.tracker.wait().await;
    }

    /// Listens again.
    pub fn listen(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        let listener = UnixListener::bind(&self.path).expect("the socket's path is free");
        let connections = CancellationToken::new();
        let tracker = TaskTracker::new();
        let accept = tokio::spawn(accept(
            listener,
            Arc::clone(&self.shared),
            connections.clone(),
            tracker.clone(),
        ));
        self.tasks = Some(ServerTasks {
            accept,
            connections,
            tracker,
        });
    }
}

impl Drop for FaultCri {
    fn drop(&mut self) {
        if let Some(serving) = &self.tasks {
            serving.accept.abort();
            serving.connections.cancel();
        }
    }
}

async fn accept(
    listener: UnixListener,
    shared: Arc<Mutex<State>>,
    shutdown: CancellationToken,
    tracker: TaskTracker,
) {
    while let Ok((stream, _)) = listener.accept().await {
        // A call can close its own connection without closing the others.
        let connection = shutdown.child_token();
        tracker.spawn(serve::connection(stream, Arc::clone(&shared), connection));
    }
}
