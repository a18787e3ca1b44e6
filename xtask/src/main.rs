//! Entry point of `cargo xtask`.

use std::process::ExitCode;

use anyhow::Result;
use clap::{Parser, Subcommand};
use testbed::cluster::{self, Cache, Node, kubernetes};
use xtask::{bench, codegen, demo, reproduce, test};

/// The commands people type while working on kruise-rs
#[derive(Parser)]
#[command(
    name = "cargo xtask",
    bin_name = "cargo xtask",
    version,
    after_help = "All but codegen need Debian, root, Go, gcc and git; they get the rest by themselves."
)]
struct Arguments {
    #[command(subcommand)]
    command: Command,

    /// Release of Kubernetes that beds run
    #[arg(
        long,
        global = true,
        env = kubernetes::RELEASE_ENV_VAR,
        default_value = kubernetes::RELEASES[0],
        value_parser = kubernetes::RELEASES,
        value_name = "VERSION"
    )]
    kubernetes: String,
}

#[derive(Subcommand)]
enum Command {
    /// Show it on a real node: an image pulled ahead, a container restarted in place, running Pods given a new image
    Demo(demo::Options),
    /// Run every test, those on real components included
    Test(test::Options),
    /// Measure with release builds, side by side with the Go implementation where its folder is given
    Bench(bench::Options),
    /// Write what is generated: deploy/crds and deploy/webhooks
    Codegen,
    /// Build the release programs of the last commit twice, in two folders, and compare them byte for byte
    Reproduce,
    /// Get what the tests and the demo need; what is there is skipped
    Prepare,
    /// Start a bare Kubernetes node to try things on; it stays until `cargo xtask down`
    Up,
    /// End everything that `up` and `demo --keep` left running
    Down,
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(why) => {
            // Without a backtrace, even if one is enabled: it would hide the earlier output.
            eprintln!("Error: {why:#}");
            ExitCode::FAILURE
        }
    }
}

fn run() -> Result<()> {
    let arguments = Arguments::parse();
    kubernetes::set_release(kubernetes::parse_release(&arguments.kubernetes)?);
    match arguments.command {
        Command::Demo(options) => demo::run(&options),
        Command::Test(options) => test::run(&options),
        Command::Bench(options) => bench::run(&options),
        Command::Codegen => codegen::run(),
        Command::Reproduce => reproduce::run(),
        Command::Prepare => test::prepare_all(&Cache::open()?),
        Command::Up => up(),
        Command::Down => {
            let count = cluster::down(&Cache::open()?, None)?;
            println!("{count} bed(s) ended");
            Ok(())
        }
    }
}

fn up() -> Result<()> {
    let node = Node::start()?;
    println!("export KUBECONFIG={}", node.plane.kubeconfig().display());
    println!("# runtime socket {}", node.runtime.socket().display());
    node.keep_running("up")
}
