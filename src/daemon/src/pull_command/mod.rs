//! `kruise-daemon pull`: gets images through the local runtime, without a cluster.
//!
//! In:  image references and ImagePullJob manifests, a Docker configuration file, the runtime's socket.
//! Out: progress on standard error, the result on standard output, exit status 0 only if all succeeded.
//!
//! The decisions are the daemon's own (`image_pull::plan`): limits, retries, credentials.

mod drive;
mod outcome;
pub mod plan;
mod show;
mod stop;

use std::future::pending;
use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;
use std::time::Duration;

use clap::{ArgGroup, ValueEnum};
use tokio::time::{sleep, timeout};
use tokio_util::sync::CancellationToken;

pub use outcome::Error;

use super::image_pull::plan::keyring::Keyring;
use kruise_cri::{Options, Runtime, Runtimes, why_none};
use kruise_ops::Progress;
use plan::{Defaults, Wanted};
use stop::Stop;

/// How long a runtime that is preferred may take to answer after another one did.
const OTHERS: Duration = Duration::from_millis(300);

/// What errors call the content of the file that they name.
const DOCKER_CONFIG: &str = "content";

/// Options of `kruise-daemon pull`.
#[derive(clap::Args, Clone, Debug)]
#[command(group = ArgGroup::new("what").required(true).multiple(true))]
pub struct Args {
    /// Images to pull: NAME[:TAG][@DIGEST]
    #[allow(rustdoc::broken_intra_doc_links)]
    #[arg(value_name = "IMAGE", group = "what")]
    pub images: Vec<String>,

    /// Manifest with ImagePullJobs whose images are pulled here, '-' for standard input; may be repeated
    #[arg(short, long, value_name = "FILE", group = "what")]
    pub filename: Vec<PathBuf>,

    /// Docker configuration with registry credentials: config.json or the directory that holds it
    #[arg(long, value_name = "PATH")]
    pub docker_config: Option<PathBuf>,

    /// CRI socket, relative to /hostvarrun (or /run where that is not mounted) or absolute; turns detection off
    #[arg(long, value_name = "PATH")]
    pub socket_file: Option<PathBuf>,

    /// Seconds to wait for a container runtime that does not answer yet
    #[arg(long, default_value_t = 0, value_name = "SECONDS")]
    pub wait: u32,

    /// How many images are pulled at once
    #[arg(long, default_value_t = 5, value_name = "N", value_parser = clap::value_parser!(u16).range(1..))]
    pub parallel: u16,

    /// Seconds that one attempt may take, where no manifest says otherwise
    #[arg(long, default_value_t = 600, value_name = "SECONDS", value_parser = clap::value_parser!(i32).range(1..))]
    pub timeout: i32,

    /// How often a failed attempt is repeated, where no manifest says otherwise
    #[arg(long, default_value_t = 3, value_name = "N")]
    pub retries: u32,

    /// Pull images that are on the node already too
    #[arg(long)]
    pub always: bool,

    /// What is printed on standard output
    #[arg(long, short, value_enum, default_value_t, value_name = "FORMAT")]
    pub output: Output,
}

/// What is printed on standard output.
#[derive(ValueEnum, Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Output {
    /// One line an image
    #[default]
    Text,
    /// One JSON document
    Json,
}

/// Pulls, shows how far it is, and tells how it went.
pub async fn run(args: Args) -> ExitCode {
    let output = args.output;
    match pull(args).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            if output == Output::Json {
                show::result(&show::error_json(&error).to_string());
            }
            show::remark(&format!("kruise-daemon: {error}"));
            ExitCode::FAILURE
        }
    }
}

async fn pull(args: Args) -> Result<bool, Error> {
    let (wanted, keyring, remark) = read(&args)?;
    for remark in wanted
        .iter()
        .filter_map(|w| w.remark.as_deref())
        .chain(remark.as_deref())
    {
        show::remark(&format!("kruise-daemon: {remark}"));
    }
    let mut stop = Stop::new();
    let wait = Duration::from_secs(args.wait.into());
    let runtime = tokio::select! {
        runtime = runtime(args.socket_file, wait) => runtime?,
        () = stop.asked() => return Err(Error::Interrupted),
    };
    let text = args.output == Output::Text;
    let view = show::View::new(text && std::io::stderr().is_terminal(), text);
    let results = drive::drive(runtime, wanted, keyring, usize::from(args.parallel), view, stop).await;
    if !text {
        show::result(&show::json(&results).to_string());
    }
    Ok(results.iter().all(|r| r.succeeded))
}

/// What to pull, with which credentials, and what is to be said of these.
fn read(args: &Args) -> Result<(Vec<Wanted>, Keyring, Option<String>), Error> {
    let defaults = Defaults {
        timeout_seconds: args.timeout,
        retries: args.retries,
        always: args.always,
    };
    let mut wanted: Vec<Wanted> = args
        .images
        .iter()
        .map(|image| plan::image(image, &defaults))
        .collect();
    for path in &args.filename {
        let text = contents(path).map_err(|why| Error::File {
            path: path.clone(),
            why,
        })?;
        let jobs = plan::jobs(&text, &defaults).map_err(|why| Error::Manifest {
            path: path.clone(),
            why,
        })?;
        wanted.extend(jobs);
    }
    let (mut keyring, mut remark) = (Keyring::default(), None);
    if let Some(path) = &args.docker_config {
        let path = if path.is_dir() {
            path.join("config.json")
        } else {
            path.clone()
        };
        let json = std::fs::read(&path).map_err(|why| Error::File {
            path: path.clone(),
            why,
        })?;
        let unused = keyring
            .add_config_json(&json, DOCKER_CONFIG)
            .map_err(|why| Error::DockerConfig {
                path: path.clone(),
                why,
            })?;
        remark = unused.map(|unused| format!("{}: {unused}", path.display()));
    }
    Ok((plan::distinct(wanted), keyring, remark))
}

fn contents(path: &Path) -> std::io::Result<String> {
    if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        return Ok(text);
    }
    std::fs::read_to_string(path)
}

/// The best runtime that answers, if one does after `wait` at the latest.
async fn runtime(socket_file: Option<PathBuf>, wait: Duration) -> Result<Arc<dyn Runtime>, Error> {
    let runtimes = Runtimes::new(&Options::new(socket_file));
    let mut changes = runtimes.subscribe();
    let answers = async {
        while !runtimes.health().iter().any(|s| s.healthy) {
            if changes.changed().await.is_err() {
                pending::<()>().await;
            }
        }
        // A better one may be about to answer. One that hangs is not waited for.
        sleep(OTHERS).await;
    };
    let look = async {
        runtimes.look().await;
        let health = runtimes.health();
        if !wait.is_zero() && !health.iter().any(|s| s.healthy) {
            let (why, seconds) = (why_none(&health), wait.as_secs());
            show::remark(&format!(
                "kruise-daemon: waiting {seconds} s for a container runtime: {why}"
            ));
            let progress = Progress::default();
            let search = runtimes.run(CancellationToken::new(), &progress);
            let _ = timeout(wait, search).await;
        }
    };
    tokio::select! {
        () = answers => {}
        () = look => {}
    }
    let health = runtimes.health();
    let first = runtimes.first().filter(|_| health.iter().any(|s| s.healthy));
    first.ok_or_else(|| Error::NoRuntime(why_none(&health)))
}
