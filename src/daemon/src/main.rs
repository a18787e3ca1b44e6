//! The node daemon: pre-pulls images, recreates containers in place, and reports its status.

use std::io::Write;
use std::process::ExitCode;

use clap::{Parser, Subcommand};
use kruise_daemon as node;

/// Pulls images ahead of time, and recreates and updates containers in place on this node
///
/// Without a subcommand it runs as the node's daemon: it watches this node's NodeImage, its Pods and the
/// ContainerRecreateRequests for them, and talks CRI to the container runtime.
#[derive(Parser)]
#[command(
    name = "kruise-daemon",
    version = kruise_ops::VERSION_AND_COMMIT,
    args_override_self = true,
    args_conflicts_with_subcommands = true
)]
struct Cli {
    #[command(subcommand)]
    command: Option<Command>,
    #[command(flatten)]
    options: node::Options,
}

#[derive(Subcommand)]
enum Command {
    /// Shows what the daemon on this node is doing
    Status(node::control::status::StatusArgs),
    /// Pulls images through the local container runtime, without a cluster
    Pull(node::pull_command::Args),
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    let result = runtime.block_on(async {
        match cli.command {
            None => node::run(cli.options).await.map_err(|e| fail(&e)),
            Some(Command::Pull(args)) => Err(node::pull_command::run(args).await),
            Some(Command::Status(args)) => node::control::status::run(&args).await.map_err(|e| fail(&e)),
        }
    });
    // A task on the blocking pool must not delay the exit.
    runtime.shutdown_background();
    result.map_or_else(|code| code, |()| ExitCode::SUCCESS)
}

fn fail(error: &dyn std::error::Error) -> ExitCode {
    // If standard error is closed, the exit status still reports the failure.
    let _ = writeln!(std::io::stderr(), "kruise-daemon: {error}");
    ExitCode::FAILURE
}
