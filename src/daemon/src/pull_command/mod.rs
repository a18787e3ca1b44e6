//! `kruise-daemon pull`: pulls images through the local runtime, without a cluster.
//!
//! In:  image references and ImagePullJob manifests, a Docker configuration file and its credential helpers, the
//!      runtime's socket.
//! Out: progress on standard error, the result on standard output, exit status 0 only if all pulls succeeded.
//!
//! The decisions are the daemon's own (`image_pull::plan`): limits, retries, credentials.

mod credential_helpers;
mod driver;
mod outcome;
mod output;
pub mod plan;
mod signals;

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
use credential_helpers::CredentialHelpers;
use kruise_cri::{DiscoveryOptions, Runtime, Runtimes, no_runtime_reason};
use kruise_ops::Progress;
use plan::{Defaults, ImageToPull};
use signals::StopSignal;

/// How long a preferred runtime may take to answer after another one did.
const PREFERRED_RUNTIME_WAIT: Duration = Duration::from_millis(300);

/// The name in errors for the content of the file.
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

/// Pulls the images, and reports progress and results.
pub async fn run(args: Args) -> ExitCode {
    let output = args.output;
    match pull(args).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            if output == Output::Json {
                output::print_stdout(&output::json_line(&output::error_json(&error)));
            }
            output::print_stderr(&format!("kruise-daemon: {error}"));
            ExitCode::FAILURE
        }
    }
}

async fn pull(args: Args) -> Result<bool, Error> {
    let (images, mut keyring, helpers) = read_inputs(&args)?;
    let mut stop = StopSignal::new();
    let problems = tokio::select! {
        problems = helpers.add_credentials(&images, &mut keyring) => problems,
        () = stop.received() => return Err(Error::Interrupted),
    };
    let warnings = images.iter().flat_map(|image| &image.warnings);
    for warning in warnings.chain(&problems) {
        output::print_stderr(&format!("kruise-daemon: {warning}"));
    }
    let wait = Duration::from_secs(args.wait.into());
    let runtime = tokio::select! {
        runtime = connect_runtime(args.socket_file, wait) => runtime?,
        () = stop.received() => return Err(Error::Interrupted),
    };
    let text = args.output == Output::Text;
    let view = output::ProgressView::new(text && std::io::stderr().is_terminal(), text);
    let results = driver::pull_all(runtime, images, keyring, usize::from(args.parallel), view, stop).await;
    if !text {
        output::print_stdout(&output::json_line(&output::results_json(&results)));
    }
    Ok(results.iter().all(|r| r.succeeded))
}

/// Reads what to pull, the credentials, and which programs know more of them.
fn read_inputs(args: &Args) -> Result<(Vec<ImageToPull>, Keyring, CredentialHelpers), Error> {
    let defaults = Defaults {
        timeout_seconds: args.timeout,
        retries: args.retries,
        always: args.always,
    };
    let mut images: Vec<ImageToPull> = args
        .images
        .iter()
        .map(|image| plan::parse_image(image, &defaults))
        .collect();
    for path in &args.filename {
        let text = read_text(path).map_err(|why| Error::File {
            path: path.clone(),
            why,
        })?;
        let jobs = plan::parse_manifest(&text, &defaults).map_err(|why| Error::Manifest {
            path: path.clone(),
            why,
        })?;
        images.extend(jobs);
    }
    let (mut keyring, mut helpers) = (Keyring::default(), CredentialHelpers::default());
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
        keyring
            .add_config_json(&json, DOCKER_CONFIG)
            .map_err(|why| Error::DockerConfig {
                path: path.clone(),
                why,
            })?;
        helpers = CredentialHelpers::parse(&json).map_err(|_| Error::CredentialHelpers { path })?;
    }
    Ok((plan::deduplicate(images), keyring, helpers))
}

fn read_text(path: &Path) -> std::io::Result<String> {
    if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        return Ok(text);
    }
    std::fs::read_to_string(path)
}

/// The preferred runtime that answers, within `wait`.
async fn connect_runtime(socket_file: Option<PathBuf>, wait: Duration) -> Result<Arc<dyn Runtime>, Error> {
    let runtimes = Runtimes::new(&DiscoveryOptions::new(socket_file));
    let mut changes = runtimes.subscribe();
    let any_healthy = async {
        while !runtimes.health().iter().any(|s| s.healthy) {
            if changes.changed().await.is_err() {
                pending::<()>().await;
            }
        }
        // A preferred one may be about to answer. A hanging one is not waited for.
        sleep(PREFERRED_RUNTIME_WAIT).await;
    };
    let detection = async {
        runtimes.probe_all().await;
        let health = runtimes.health();
        if !wait.is_zero() && !health.iter().any(|s| s.healthy) {
            let (why, seconds) = (no_runtime_reason(&health), wait.as_secs());
            output::print_stderr(&format!(
                "kruise-daemon: waiting {seconds} s for a container runtime: {why}"
            ));
            let progress = Progress::default();
            let detection = runtimes.run(CancellationToken::new(), &progress);
            let _ = timeout(wait, detection).await;
        }
    };
    tokio::select! {
        () = any_healthy => {}
        () = detection => {}
    }
    let health = runtimes.health();
    let first = runtimes.preferred().filter(|_| health.iter().any(|s| s.healthy));
    first.ok_or_else(|| Error::NoRuntime(no_runtime_reason(&health)))
}
