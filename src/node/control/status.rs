//! `kruise-daemon status`: what a node is doing, as a table or as JSON, once or live.

use std::error::Error as _;
use std::io::{self, IsTerminal, Write};
use std::path::PathBuf;
use std::time::Duration;

use clap::{Args, ValueEnum};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;
use tokio_stream::StreamExt;
use tonic::transport::{Channel, Endpoint, Uri};

use super::v1::node_control_client::NodeControlClient;
use super::v1::{ListPullsRequest, ListRecreatesRequest, ListRestartsRequest, ListRuntimesRequest};
use super::{DEFAULT_SOCKET, render};

/// Arguments of `kruise-daemon status`.
#[derive(Args, Clone, Debug)]
pub struct StatusArgs {
    /// Stay, and show every change until interrupted
    #[arg(long, short)]
    pub watch: bool,
    /// Table for people, or JSON for scripts (one object a line with --watch)
    #[arg(long, short, value_enum, default_value_t, value_name = "FORMAT")]
    pub output: Output,
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

/// Why there is no status to show.
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
    /// The daemon answered with an error, or went away.
    #[error("kruise-daemon: {0}")]
    Call(#[from] tonic::Status),
    /// The output is gone.
    #[error("cannot write: {0}")]
    Write(#[from] io::Error),
}

/// How long the daemon may take to answer.
const DEADLINE: Duration = Duration::from_secs(5);

type Client = NodeControlClient<Channel>;

/// Prints the status; with `watch`, until the daemon goes away or the output is closed.
///
/// # Errors
/// When no daemon answers.
pub async fn run(args: &StatusArgs) -> Result<(), Error> {
    let mut client = connect(args).await?;
    if args.watch {
        return watch(args, client).await;
    }
    let status = render::Status {
        pulls: client.list_pulls(ListPullsRequest {}).await?.into_inner().pulls,
        recreates: client
            .list_recreates(ListRecreatesRequest {})
            .await?
            .into_inner()
            .recreates,
        restarts: client
            .list_restarts(ListRestartsRequest {})
            .await?
            .into_inner()
            .restarts,
        runtimes: client
            .list_runtimes(ListRuntimesRequest {})
            .await?
            .into_inner()
            .runtimes,
    };
    print(args.output, &status, false)
}

async fn connect(args: &StatusArgs) -> Result<Client, Error> {
    let socket = args.control_socket.clone();
    let connector = tower::service_fn(move |_: Uri| {
        let socket = socket.clone();
        async move { Ok::<_, io::Error>(TokioIo::new(UnixStream::connect(socket).await?)) }
    });
    // The URI is never looked up: the connector goes to the socket.
    let endpoint = Endpoint::from_static("http://control").connect_timeout(DEADLINE);
    let channel = endpoint
        .connect_with_connector(connector)
        .await
        .map_err(|error| Error::Unreachable {
            socket: args.control_socket.clone(),
            // Its own words say no more than that there was an error.
            why: crate::cluster::chain(error.source().unwrap_or(&error)),
        })?;
    Ok(Client::new(channel))
}

enum News {
    Pulls(Vec<super::v1::Pull>),
    Recreates(Vec<super::v1::Recreate>),
    Restarts(Vec<super::v1::Restart>),
    Runtimes(Vec<super::v1::Runtime>),
}

async fn watch(args: &StatusArgs, mut client: Client) -> Result<(), Error> {
    let pulls = client.watch_pulls(ListPullsRequest {}).await?.into_inner();
    let recreates = client
        .watch_recreates(ListRecreatesRequest {})
        .await?
        .into_inner();
    let restarts = client.watch_restarts(ListRestartsRequest {}).await?.into_inner();
    let runtimes = client.watch_runtimes(ListRuntimesRequest {}).await?.into_inner();
    let mut news = pulls
        .map(|m| m.map(|m| News::Pulls(m.pulls)))
        .merge(recreates.map(|m| m.map(|m| News::Recreates(m.recreates))))
        .merge(restarts.map(|m| m.map(|m| News::Restarts(m.restarts))))
        .merge(runtimes.map(|m| m.map(|m| News::Runtimes(m.runtimes))));
    let mut status = render::Status::default();
    let live = io::stdout().is_terminal();
    while let Some(item) = news.next().await {
        match item? {
            News::Pulls(pulls) => status.pulls = pulls,
            News::Recreates(recreates) => status.recreates = recreates,
            News::Restarts(restarts) => status.restarts = restarts,
            News::Runtimes(runtimes) => status.runtimes = runtimes,
        }
        print(args.output, &status, live)?;
    }
    Ok(())
}

/// Prints; `in_place` wipes the terminal first, so that the table stands still.
fn print(output: Output, status: &render::Status, in_place: bool) -> Result<(), Error> {
    let mut out = io::stdout().lock();
    match output {
        Output::Json => writeln!(out, "{}", render::json(status))?,
        Output::Table => {
            let wipe = if in_place { "\x1b[H\x1b[2J" } else { "" };
            write!(out, "{wipe}{}", render::table(status))?;
        }
    }
    Ok(out.flush()?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used)]

    use super::*;

    #[tokio::test]
    async fn where_nobody_answers_the_reason_and_what_to_look_at_are_told() {
        let args = StatusArgs {
            watch: false,
            output: Output::Table,
            control_socket: "/nowhere/control.sock".into(),
        };
        let told = run(&args).await.unwrap_err().to_string();
        let begin = "no kruise-daemon answers at /nowhere/control.sock: No such file or directory";
        assert!(told.starts_with(begin), "{told}");
    }
}
