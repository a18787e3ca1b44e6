//! The kubectl plugin: `kubectl kruise …` runs this program.
//!
//! Each command is a folder: `plan.rs` decides what is printed, done and returned, `mod.rs` reads and writes.

mod arguments;
mod client;
mod conditions;
mod error;
#[cfg(test)]
mod fake_server;
mod node;
mod output;
mod pull;
mod restart;
mod rollout;
mod signals;
mod status;

use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kruise_api::text::printable;

use client::GlobalOptions;
use error::Error;

/// Shows what Kruise does in a cluster, pulls images, restarts containers and controls rollouts
#[derive(Parser)]
#[command(name = "kubectl-kruise", bin_name = "kubectl kruise", version = kruise_ops::VERSION_AND_COMMIT)]
struct Cli {
    #[command(flatten)]
    global: GlobalOptions,
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Shows whether Kruise is ready, and what waits or has failed, in all namespaces unless one is given
    Status(status::Options),
    /// Shows image pulls, ContainerRecreateRequests and Pod probes of a node
    Node(node::Options),
    /// Pulls an image on nodes, by an ImagePullJob
    Pull(pull::Options),
    /// Restarts containers of a Pod, or of the Pods of a CloneSet, in place
    Restart(restart::Options),
    /// Shows and controls the rollout of a CloneSet or SidecarSet
    Rollout(rollout::Options),
}

fn main() -> ExitCode {
    let code = match Cli::try_parse() {
        Ok(cli) => run_to_end(cli).map_or_else(|error| report(&error), |()| 0),
        Err(error) => usage(&error),
    };
    let Some(why) = output::write_error() else {
        return ExitCode::from(code);
    };
    eprint_text(&format!("{}\n", printable(why)));
    ExitCode::from(if code == 0 { error::FAILED } else { code })
}

fn run_to_end(cli: Cli) -> Result<(), Error> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = runtime.map_err(|why| Error::Refused(why.to_string()))?;
    let result = runtime.block_on(run(cli));
    // A name that is still being resolved must not delay the exit.
    runtime.shutdown_background();
    result
}

async fn run(cli: Cli) -> Result<(), Error> {
    let connection = client::connect(&cli.global).await?;
    match cli.command {
        Command::Status(options) => status::run(&connection, options).await,
        Command::Node(options) => node::run(&connection, options).await,
        Command::Pull(options) => pull::run(&connection, options).await,
        Command::Restart(options) => restart::run(&connection, options).await,
        Command::Rollout(options) => rollout::run(&connection, options).await,
    }
}

/// Prints help, or what is wrong with the arguments; returns the exit code.
fn usage(error: &clap::Error) -> u8 {
    let text = error.to_string();
    // Arguments may come from a script, which had them from elsewhere.
    let lines: String = text
        .lines()
        .map(|line| format!("{}\n", printable(line)))
        .collect();
    if error.use_stderr() {
        eprint_text(&lines);
    } else {
        output::print(&lines);
    }
    u8::try_from(error.exit_code()).unwrap_or(error::FAILED)
}

/// Prints an error; returns its exit code.
fn report(error: &Error) -> u8 {
    eprint_text(&format!("{}\n", error.text()));
    error.exit_code()
}

/// Prints on standard error. If that is closed, the exit code still reports the failure.
fn eprint_text(text: &str) {
    use std::io::Write;
    let _ = write!(std::io::stderr(), "{text}");
}
