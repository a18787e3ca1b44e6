//! `kruise-daemon status`: what a node is doing, as a table or as JSON, once or live.

use std::error::Error as _;
use std::fs::File;
use std::future::pending;
use std::io::{self, IsTerminal, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::{Args, ValueEnum};
use console::Term;
use hyper_util::rt::TokioIo;
use nix::fcntl::OFlag;
use tokio::io::Interest;
use tokio::net::UnixStream;
use tokio::net::unix::pipe;
use tokio::time::timeout;
use tokio_stream::StreamExt;
use tonic::Response;
use tonic::transport::{Channel, Endpoint, Uri};

use super::v1::node_control_client::NodeControlClient;
use super::v1::{ListPullsRequest, ListRecreatesRequest, ListRestartsRequest, ListRuntimesRequest};
use super::{DEFAULT_SOCKET, render};

/// Arguments of `kruise-daemon status`.
#[derive(Args, Clone, Debug)]
pub struct StatusArgs {
    /// Stay, and show every change until interrupted, or until standard input or output is closed
    #[arg(long, short)]
    pub watch: bool,
    /// Table for people, or JSON for scripts (one object a line with --watch)
    #[arg(long, short, value_enum, default_value_t, value_name = "FORMAT")]
    pub output: Output,
    /// List every pull that has ended, not only the latest ten
    #[arg(long, short)]
    pub all: bool,
    /// The control socket of the daemon, which only root may open
    #[arg(long, default_value = DEFAULT_SOCKET, value_name = "PATH")]
    pub control_socket: PathBuf,
}

/// How the status is printed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Output {
    /// Aligned columns.
    #[default]
    Table,
    /// JSON.
    Json,
}

/// Why no status can be shown.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The daemon cannot be reached.
    #[error(
        "no kruise-daemon answers at {socket}: {why}; is it running, and are you root? (--control-socket names another place)"
    )]
    Unreachable {
        /// The socket.
        socket: PathBuf,
        /// The reason.
        why: String,
    },
    /// The daemon accepts connections but does not answer.
    #[error("kruise-daemon at {socket} did not answer within {} s; is it stopped?", CALL_TIMEOUT.as_secs())]
    Silent {
        /// The socket.
        socket: PathBuf,
    },
    /// The daemon returned an error or closed the connection.
    #[error("kruise-daemon: {0}")]
    Call(#[from] tonic::Status),
    /// The output was closed.
    #[error("cannot write: {0}")]
    Write(#[from] io::Error),
}

/// Timeout for each answer of the daemon.
const CALL_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest answer that is read; that of a node with many pulls exceeds gRPC's 4 MiB.
const MAX_RESPONSE_BYTES: usize = 16 << 20;

type Client = NodeControlClient<Channel>;

/// Prints the status once; with `watch`, until the daemon or the reader disconnects.
///
/// # Errors
/// When no daemon answers.
pub async fn run(args: &StatusArgs) -> Result<(), Error> {
    match show_status(args).await {
        // A reader that closed the pipe has read enough.
        Err(Error::Write(error)) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        shown => shown,
    }
}

async fn show_status(args: &StatusArgs) -> Result<(), Error> {
    let mut client = connect(&args.control_socket).await?;
    if args.watch {
        return watch(args, client).await;
    }
    let socket = &args.control_socket;
    let status = render::NodeStatus {
        pulls: call_with_timeout(socket, client.list_pulls(ListPullsRequest {}))
            .await?
            .pulls,
        recreates: call_with_timeout(socket, client.list_recreates(ListRecreatesRequest {}))
            .await?
            .recreates,
        restarts: call_with_timeout(socket, client.list_restarts(ListRestartsRequest {}))
            .await?
            .restarts,
        runtimes: call_with_timeout(socket, client.list_runtimes(ListRuntimesRequest {}))
            .await?
            .runtimes,
    };
    let text = match args.output {
        Output::Json => render::json_line(&status),
        Output::Table => render::table(&status, layout(args)),
    };
    Ok(print(&text)?)
}

/// A terminal has a limited width; a pipe gets everything.
fn layout(args: &StatusArgs) -> render::Layout {
    let size = Term::stdout()
        .size_checked()
        .filter(|_| io::stdout().is_terminal());
    render::Layout {
        width: size.map(|(_, columns)| usize::from(columns)),
        all: args.all,
    }
}

/// The response to one call. Even a hanging daemon accepts connections.
async fn call_with_timeout<T>(
    socket: &Path,
    call: impl Future<Output = Result<Response<T>, tonic::Status>>,
) -> Result<T, Error> {
    match timeout(CALL_TIMEOUT, call).await {
        Ok(answer) => Ok(answer?.into_inner()),
        Err(_) => Err(Error::Silent {
            socket: socket.to_owned(),
        }),
    }
}

/// Connects to the daemon that serves this socket.
pub(super) async fn connect(path: &Path) -> Result<Client, Error> {
    let socket = path.to_owned();
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
    });
    // The URI is never resolved: the connector connects to the socket.
    let endpoint = Endpoint::from_static("http://control")
        .connect_timeout(CALL_TIMEOUT)
        // Detects a daemon that stops during a watch.
        .http2_keep_alive_interval(CALL_TIMEOUT)
        .keep_alive_timeout(CALL_TIMEOUT)
        .keep_alive_while_idle(true);
    let channel = endpoint
        .connect_with_connector(connector)
        .await
        .map_err(|error| Error::Unreachable {
            socket: path.to_owned(),
            // The error's own message only states that an error occurred.
            why: kruise_cluster::error_chain(error.source().unwrap_or(&error)),
        })?;
    Ok(Client::new(channel).max_decoding_message_size(MAX_RESPONSE_BYTES))
}

enum ListUpdate {
    Pulls(Vec<super::v1::Pull>),
    Recreates(Vec<super::v1::Recreate>),
    Restarts(Vec<super::v1::Restart>),
    Runtimes(Vec<super::v1::Runtime>),
}

async fn watch(args: &StatusArgs, mut client: Client) -> Result<(), Error> {
    let socket = &args.control_socket;
    let pulls = call_with_timeout(socket, client.watch_pulls(ListPullsRequest {})).await?;
    let recreates = call_with_timeout(socket, client.watch_recreates(ListRecreatesRequest {})).await?;
    let restarts = call_with_timeout(socket, client.watch_restarts(ListRestartsRequest {})).await?;
    let runtimes = call_with_timeout(socket, client.watch_runtimes(ListRuntimesRequest {})).await?;
    let mut updates = pulls
        .map(|m| m.map(|m| ListUpdate::Pulls(m.pulls)))
        .merge(recreates.map(|m| m.map(|m| ListUpdate::Recreates(m.recreates))))
        .merge(restarts.map(|m| m.map(|m| ListUpdate::Restarts(m.restarts))))
        .merge(runtimes.map(|m| m.map(|m| ListUpdate::Runtimes(m.runtimes))));
    let mut status = render::NodeStatus::default();
    let mut output = WatchOutput::new(args);
    let mut reader_closed = std::pin::pin!(wait_for_reader_closed());
    // Each list is received once before the end: without standard input the reader counts as closed at once.
    let mut received = 0_usize;
    loop {
        let item = tokio::select! {
            item = updates.next() => item,
            () = &mut reader_closed, if received >= 4 => return Ok(()),
        };
        match item.transpose()? {
            None => return Ok(()),
            Some(ListUpdate::Pulls(pulls)) => status.pulls = pulls,
            Some(ListUpdate::Recreates(recreates)) => status.recreates = recreates,
            Some(ListUpdate::Restarts(restarts)) => status.restarts = restarts,
            Some(ListUpdate::Runtimes(runtimes)) => status.runtimes = runtimes,
        }
        received = received.saturating_add(1);
        output.show(&status)?;
    }
}

/// Where `--watch` prints.
struct WatchOutput<'a> {
    args: &'a StatusArgs,
    terminal: bool,
    last_status: Option<render::NodeStatus>,
}

impl<'a> WatchOutput<'a> {
    fn new(args: &'a StatusArgs) -> Self {
        Self {
            args,
            terminal: io::stdout().is_terminal(),
            last_status: None,
        }
    }

    /// A terminal shows a table in place; a file or a pipe gets the changes.
    fn show(&mut self, status: &render::NodeStatus) -> io::Result<()> {
        if self.last_status.as_ref() == Some(status) {
            return Ok(());
        }
        let text = match self.args.output {
            Output::Json => render::json_line(status),
            Output::Table if self.terminal => {
                format!("\x1b[H\x1b[2J{}", render::table(status, layout(self.args)))
            }
            Output::Table => render::diff(&self.last_status.take().unwrap_or_default(), status),
        };
        self.last_status = Some(status.clone());
        print(&text)
    }
}

/// Returns when the reader has gone: `kubectl exec` leaves the program running when it exits, and closes its standard
/// input, if it has one.
async fn wait_for_reader_closed() {
    tokio::select! {
        () = wait_for_stdin_closed() => {}
        () = wait_for_stdout_closed() => {}
    }
}

/// A closed terminal sends a signal instead.
async fn wait_for_stdin_closed() {
    if io::stdin().is_terminal() {
        return pending().await;
    }
    // An input that cannot be read counts as closed, too.
    let _ = tokio::task::spawn_blocking(|| io::copy(&mut io::stdin().lock(), &mut io::sink())).await;
}

/// Only a pipe reports this.
async fn wait_for_stdout_closed() {
    let open_stdout = || {
        let mut stdout = File::options();
        stdout.write(true).custom_flags(OFlag::O_NONBLOCK.bits());
        pipe::Sender::from_file(stdout.open("/proc/self/fd/1")?)
    };
    match open_stdout() {
        Ok(pipe) => drop(pipe.ready(Interest::ERROR).await),
        Err(_) => pending().await,
    }
}

fn print(text: &str) -> io::Result<()> {
    let mut out = io::stdout().lock();
    out.write_all(text.as_bytes())?;
    out.flush()
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[tokio::test(start_paused = true)]
    async fn hanging_daemon_is_reported_after_the_timeout() {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control.sock");
        let _silent = tokio::net::UnixListener::bind(&socket).unwrap();
        let args = StatusArgs {
            watch: false,
            output: Output::Table,
            all: false,
            control_socket: socket,
        };
        let error = run(&args).await.unwrap_err().to_string();
        assert!(error.contains("did not answer within 5 s"), "{error}");
    }

    #[tokio::test]
    async fn unreachable_daemon_error_names_the_cause() {
        let args = StatusArgs {
            watch: false,
            output: Output::Table,
            all: false,
            control_socket: "/nowhere/control.sock".into(),
        };
        let error = run(&args).await.unwrap_err().to_string();
        let expected = "no kruise-daemon answers at /nowhere/control.sock: No such file or directory";
        assert!(error.starts_with(expected), "{error}");
    }
}
