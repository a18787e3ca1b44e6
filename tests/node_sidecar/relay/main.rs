//! A sidecar that serves requests, and hands its listening socket over to its successor, as proxies do: Envoy in a hot
//! restart, MOSN in a smooth upgrade.
//!
//! * `relay serve VERSION [MODE]` is the container's process. It serves after the first `take-over`.
//! * `relay take-over` is the postStart hook: returns when this container serves, and the other one does not any more.
//! * `relay drain` is the preStop hook: returns when every accepted connection is finished. If this container serves and
//!   the other one runs, that one takes over before.
//! * `relay ready` is the readiness probe.
//!
//! The two containers of a sidecar share the network namespace of their Pod, and so its abstract Unix sockets: each one
//! listens on a socket that has its `SIDECARSET_VERSION` in the name, and finds the other one by `SIDECARSET_VERSION_ALT`.
//! The listening socket itself is handed over and never closed, so that no connection in its queue is reset.

mod message;

use std::cell::Cell;
use std::env;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::time::Duration;

use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::watch;
use tokio::task::LocalSet;

use message::{receive, send};

/// Port of the requests.
const PORT: u16 = 8080;
/// Longer than the process needs from its start to its control socket.
const START_TIMEOUT: Duration = Duration::from_secs(20);

/// Whether a version works.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Mode {
    Works,
    /// It never becomes ready, and so does not take over.
    NeverReady,
    /// It takes over, but never becomes ready.
    NeverReadyAfterTakeOver,
}

struct Relay {
    version: String,
    mode: Mode,
    took_over: Cell<bool>,
    /// The listening socket, while this container serves.
    listener: watch::Sender<Option<Rc<TcpListener>>>,
    connections: watch::Sender<usize>,
}

fn main() -> io::Result<()> {
    let words: Vec<String> = env::args().skip(1).collect();
    let words: Vec<&str> = words.iter().map(String::as_str).collect();
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()?;
    LocalSet::new().block_on(&runtime, async {
        match words[..] {
            ["serve", version] => serve(version, Mode::Works).await,
            ["serve", version, "never-ready"] => serve(version, Mode::NeverReady).await,
            ["serve", version, "never-ready-after-take-over"] => {
                serve(version, Mode::NeverReadyAfterTakeOver).await
            }
            ["take-over"] => call(&format!("take-over {}", other_version())).await,
            ["drain"] => call("drain").await,
            ["ready"] => call("ready").await,
            _ => Err(io::Error::other("see the comment of the source")),
        }
    })
}

/// Version of this container. A sidecar without hot upgrade has none.
fn own_version() -> String {
    env::var("SIDECARSET_VERSION").unwrap_or_else(|_| "1".to_owned())
}

fn other_version() -> String {
    env::var("SIDECARSET_VERSION_ALT").unwrap_or_else(|_| "0".to_owned())
}

/// Name of the abstract control socket of the container that has this version.
fn control_socket(version: &str) -> String {
    format!("\0relay-{version}")
}

/// Sends a command to the process of this container, and returns its result.
async fn call(command: &str) -> io::Result<()> {
    let connect = async {
        loop {
            if let Ok(stream) = UnixStream::connect(control_socket(&own_version())).await {
                return stream;
            }
            // A hook starts together with the process of its container.
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    };
    let stream = tokio::time::timeout(START_TIMEOUT, connect).await?;
    send(&stream, command, None).await?;
    match receive(&stream).await?.0.as_str() {
        "ok" => Ok(()),
        answer => Err(io::Error::other(format!("{command}: {answer}"))),
    }
}

async fn serve(version: &str, mode: Mode) -> io::Result<()> {
    let relay = Rc::new(Relay {
        version: version.to_owned(),
        mode,
        took_over: Cell::new(false),
        listener: watch::Sender::new(None),
        connections: watch::Sender::new(0),
    });
    let control = UnixListener::bind(control_socket(&own_version()))?;
    let mut term = signal(SignalKind::terminate())?;
    tokio::task::spawn_local(accept_connections(relay.clone()));
    println!(
        "{version}: version {}, the other container has {}",
        own_version(),
        other_version()
    );
    loop {
        tokio::select! {
            stream = control.accept() => {
                let stream = stream?.0;
                tokio::task::spawn_local(answer_command(relay.clone(), stream));
            }
            _ = term.recv() => return Ok(()),
        }
    }
}

async fn answer_command(relay: Rc<Relay>, stream: UnixStream) -> io::Result<()> {
    let command = receive(&stream).await?.0;
    println!("{}: {command}", relay.version);
    let result = match command.split_once(' ') {
        Some(("take-over", from)) => relay.take_over(from).await,
        _ if command == "give" => return relay.give(&stream).await,
        _ if command == "drain" => relay.drain().await,
        _ => relay.ready(),
    };
    let answer = result.map_or_else(|why| why.to_string(), |()| "ok".to_owned());
    println!("{}: {command}: {answer}", relay.version);
    send(&stream, &answer, None).await
}

impl Relay {
    fn ready(&self) -> io::Result<()> {
        let ready = self.mode == Mode::Works && self.took_over.get();
        ready.then_some(()).ok_or_else(|| io::Error::other("not ready"))
    }

    /// Takes the listening socket from the other container, or opens it if there is none.
    async fn take_over(&self, from: &str) -> io::Result<()> {
        if self.mode == Mode::NeverReady {
            return Ok(());
        }
        if let Ok(other) = UnixStream::connect(control_socket(from)).await {
            send(&other, "give", None).await?;
            let (_, socket) = receive(&other).await?;
            let socket = socket.ok_or_else(|| io::Error::other("the other container does not serve"))?;
            self.start(TcpListener::from_std(socket.into())?);
            send(&other, "taken", None).await?;
            receive(&other).await?;
        } else {
            self.start(TcpListener::bind((Ipv4Addr::UNSPECIFIED, PORT)).await?);
        }
        Ok(())
    }

    fn start(&self, listener: TcpListener) {
        self.listener.send_replace(Some(Rc::new(listener)));
        self.took_over.set(true);
    }

    /// Hands the listening socket to the other container, and accepts no more when that one accepts.
    async fn give(&self, stream: &UnixStream) -> io::Result<()> {
        let listener = self.listener.borrow().clone();
        let socket: Option<OwnedFd> = listener.map(|l| l.as_fd().try_clone_to_owned()).transpose()?;
        send(stream, "socket", socket.as_ref().map(AsFd::as_fd)).await?;
        if receive(stream).await?.0 == "taken" {
            self.listener.send_replace(None);
        }
        send(stream, "ok", None).await
    }

    /// Lets the other container take over if this one serves, and waits for the end of all connections.
    async fn drain(&self) -> io::Result<()> {
        let serves = || self.listener.borrow().is_some();
        if serves()
            && let Ok(other) = UnixStream::connect(control_socket(&other_version())).await
        {
            send(&other, &format!("take-over {}", own_version()), None).await?;
            receive(&other).await?;
        }
        self.listener.send_replace(None);
        let mut connections = self.connections.subscribe();
        let ended = connections.wait_for(|connections| *connections == 0).await;
        ended.map(drop).map_err(io::Error::other)
    }

    /// Answers each line `NUMBER MILLISECONDS` after that time with `NUMBER VERSION`, and with `close` behind it if the
    /// connection is closed then.
    async fn answer_requests(&self, mut stream: TcpStream) -> io::Result<()> {
        let (read, mut write) = stream.split();
        let mut lines = BufReader::new(read).lines();
        while let Some(line) = lines.next_line().await? {
            let (number, wait) = line.split_once(' ').unwrap_or((&line, "0"));
            let wait = wait.parse().map_err(io::Error::other)?;
            tokio::time::sleep(Duration::from_millis(wait)).await;
            let close = self.listener.borrow().is_none();
            let end = if close { " close" } else { "" };
            let answer = format!("{number} {}{end}\n", self.version);
            write.write_all(answer.as_bytes()).await?;
            if close {
                break;
            }
        }
        Ok(())
    }
}

async fn accept_connections(relay: Rc<Relay>) {
    let mut listeners = relay.listener.subscribe();
    loop {
        let listener = listeners.borrow_and_update().clone();
        let Some(listener) = listener else {
            // The sender is a part of `relay`, so it never closes.
            listeners.changed().await.ok();
            continue;
        };
        tokio::select! {
            _ = listeners.changed() => {}
            accepted = listener.accept() => if let Ok((stream, _)) = accepted {
                let relay = relay.clone();
                tokio::task::spawn_local(async move {
                    relay.connections.send_modify(|connections| *connections += 1);
                    if let Err(why) = relay.answer_requests(stream).await {
                        println!("{}: {why}", relay.version);
                    }
                    relay.connections.send_modify(|connections| *connections -= 1);
                });
            }
        }
    }
}
