//! `kruise-daemon pull`: gets images through the local runtime, without a cluster.
//!
//! In:  image references and ImagePullJob manifests, a Docker configuration file, the runtime's socket.
//! Out: progress on standard error, the result on standard output, exit status 0 only if all succeeded.
//!
//! The decisions are the daemon's own (`image_pull::plan`): limits, retries, credentials.

mod drive;
pub mod plan;
mod show;

use std::io::{IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::sync::Arc;

use clap::{ArgGroup, ValueEnum};

use super::image_pull::plan::keyring::{self, Keyring};
use crate::cri::{Options, Runtime, Runtimes};
use plan::{Defaults, Wanted};

/// What errors call the content of the file that they name.
const DOCKER_CONFIG: &str = "content";

/// Options of `kruise-daemon pull`.
#[derive(clap::Args, Clone, Debug)]
#[command(group = ArgGroup::new("what").required(true).multiple(true))]
pub struct Args {
    /// Images to pull: NAME[:TAG][@DIGEST]
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

/// Why nothing was pulled.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A file cannot be read.
    #[error("{path}: {why}")]
    File {
        /// Which.
        path: PathBuf,
        /// Why not.
        why: std::io::Error,
    },
    /// A manifest is not what it should be.
    #[error("{path}: {why}")]
    Manifest {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        why: plan::Error,
    },
    /// The Docker configuration is not one.
    #[error("{path} cannot be used: {why}")]
    DockerConfig {
        /// Which.
        path: PathBuf,
        /// What is wrong with it.
        why: keyring::Error,
    },
    /// There is no runtime to pull with.
    #[error("no container runtime answers: {0}")]
    NoRuntime(String),
}

impl Error {
    /// Whether the same command may succeed later.
    #[must_use]
    pub fn retryable(&self) -> bool {
        matches!(self, Self::NoRuntime(_))
    }

    /// The word for it in JSON output.
    #[must_use]
    pub fn category(&self) -> &'static str {
        match self {
            Self::File { .. } => "file",
            Self::Manifest { .. } => "manifest",
            Self::DockerConfig { .. } => "docker_config",
            Self::NoRuntime(_) => "no_runtime",
        }
    }
}

/// Pulls, shows how far it is, and tells how it went.
pub async fn run(args: Args) -> ExitCode {
    let output = args.output;
    match pull(args).await {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(error) => {
            if output == Output::Json {
                println!("{}", show::error_json(&error));
            }
            eprintln!("kruise-daemon: {error}");
            ExitCode::FAILURE
        }
    }
}

async fn pull(args: Args) -> Result<bool, Error> {
    let (wanted, keyring) = read(&args)?;
    for remark in wanted.iter().filter_map(|w| w.remark.as_deref()) {
        eprintln!("kruise-daemon: {remark}");
    }
    let runtime = runtime(args.socket_file).await?;
    let text = args.output == Output::Text;
    let view = show::View::new(text && std::io::stderr().is_terminal(), text);
    let results = drive::drive(runtime, wanted, keyring, usize::from(args.parallel), view).await;
    if !text {
        println!("{}", show::json(&results));
    }
    Ok(results.iter().all(|r| r.succeeded))
}

fn read(args: &Args) -> Result<(Vec<Wanted>, Keyring), Error> {
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
    let mut keyring = Keyring::default();
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
            .map_err(|why| Error::DockerConfig { path, why })?;
    }
    Ok((plan::distinct(wanted), keyring))
}

fn contents(path: &Path) -> std::io::Result<String> {
    if path == Path::new("-") {
        let mut text = String::new();
        std::io::stdin().read_to_string(&mut text)?;
        return Ok(text);
    }
    std::fs::read_to_string(path)
}

async fn runtime(socket_file: Option<PathBuf>) -> Result<Arc<dyn Runtime>, Error> {
    let runtimes = Runtimes::new(&Options::new(socket_file));
    runtimes.look().await;
    runtimes.first().ok_or_else(|| {
        // What follows the first part is for those who stay and wait.
        let first = |words: &str| words.split("; ").next().unwrap_or_default().to_owned();
        let words: Vec<String> = runtimes.health().iter().map(|h| first(&h.words)).collect();
        Error::NoRuntime(words.join("; "))
    })
}
