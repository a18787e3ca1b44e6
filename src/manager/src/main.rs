//! The manager: runs the controllers and serves admission.

use std::process::ExitCode;

use clap::Parser;
use kruise_manager as manager;

#[global_allocator]
static HEAP: mimalloc::MiMalloc = mimalloc::MiMalloc;

/// Keeps the Pods of CloneSets, fans ImagePullJobs out to nodes, and looks after ContainerRecreateRequests
///
/// Several replicas may run: all of them serve webhooks, and controllers work in the one that holds the Lease. --role
/// chooses one half.
#[derive(Parser)]
#[command(name = "kruise-manager", version = kruise_ops::VERSION_AND_COMMIT, args_override_self = true)]
struct Cli {
    #[command(flatten)]
    options: manager::Options,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    let runtime = match tokio::runtime::Builder::new_current_thread().enable_all().build() {
        Ok(runtime) => runtime,
        Err(error) => return fail(&error),
    };
    let result = runtime.block_on(manager::run(cli.options));
    // Tasks that still run on the blocking pool must not delay the exit.
    runtime.shutdown_background();
    match result {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => fail(&error),
    }
}

fn fail(error: &dyn std::error::Error) -> ExitCode {
    eprintln!("kruise-manager: {error}");
    ExitCode::FAILURE
}
