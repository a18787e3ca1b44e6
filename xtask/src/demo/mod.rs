//! `cargo xtask demo`: starts a node, pre-pulls an image, restarts a container in place, and updates the images of
//! Pods and of their sidecars without replacing the Pods.

mod dashboard;
mod fleet;
mod pull;
mod recreate;
mod rollout;
mod screen;
mod sidecar;
mod watch;

use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::mpsc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, anyhow, ensure};
use clap::{Args, value_parser};

use crate::codegen::repository_dir;
use crate::image::Binaries;
use screen::Screen;
use testbed::cluster::prepare::{self, NODE_PARTS, Part};
use testbed::cluster::{
    self, Cache, Image, Node, Worker, cgroups_named, run as run_program, run_command,
    with_parent_death_signal,
};
use testbed::wait;

/// The image that the example job pulls. The bed serves a stand-in of this size in MiB under this name.
const PULLED_IMAGE: (&str, usize) = ("library/nginx:alpine", 96);
/// Registry bandwidth during the pull, so that progress is visible.
const MEBIBITS_PER_SECOND: u32 = 200;

/// Owner that kept beds are marked with.
const KEPT_BY: &str = "demo";

/// Names of the nodes beyond the first one.
const WORKERS: [&str; 2] = ["node-2", "node-3"];

/// Options of `cargo xtask demo`.
#[derive(Args, Debug, Default)]
pub struct Options {
    /// Nodes of the cluster; with several, the demo shows a job over all of them, one of which is cut off
    #[arg(long, value_name = "NUMBER", default_value_t = 1, value_parser = value_parser!(u8).range(1..=3))]
    nodes: u8,
    /// Leave the cluster running and print its KUBECONFIG
    #[arg(long, conflicts_with = "down")]
    keep: bool,
    /// End the clusters that --keep left running
    #[arg(long)]
    down: bool,
    /// Also write what is shown to a file, as plain text
    #[arg(long, value_name = "FILE", conflicts_with = "down")]
    record: Option<PathBuf>,
    /// Also scrape the programs with Prometheus, and draw the dashboard of deploy/observability into a PNG file
    #[arg(long, value_name = "FILE", conflicts_with = "down")]
    dashboard: Option<PathBuf>,
}

/// Runs the demo.
pub fn run(options: &Options) -> Result<()> {
    let cache = Cache::open()?;
    if options.down {
        let count = cluster::down(&cache, Some(KEPT_BY))?;
        // Each node has a sandbox.
        println!("{count} node(s) ended");
        return Ok(());
    }
    prepare::ensure(&cache, &[Part::Protoc])?;
    // In parallel: the end of a release build keeps only one core busy.
    let (lines_tx, lines) = mpsc::channel();
    let building = thread::spawn(move || {
        Binaries::build(|line| {
            // No one receives them if the bed could not be prepared.
            let _ = lines_tx.send(line.to_owned());
        })
    });
    prepare::ensure(&cache, &NODE_PARTS)?;
    let started = Instant::now();
    let mut screen = Screen::new(options.record.as_deref())?;
    screen.title(
        "kruise-rs: pull an image ahead of time, restart a container in place, update Pods and sidecars where they are",
    )?;
    let binaries = wait_for_build(&mut screen, building, lines)?;
    let node = start_node(&mut screen)?;
    let workers = start_workers(&mut screen, &node, usize::from(options.nodes) - 1)?;
    if let Err(error) = run_steps(&mut screen, &node, &workers, &binaries, options) {
        let error = error.context(diagnostics(&node));
        if options.keep {
            screen.line(&format!(
                "Left as it is: export KUBECONFIG={}",
                node.plane.kubeconfig().display()
            ))?;
            keep_running(node, workers)?;
        }
        return Err(error);
    }
    shut_down(&mut screen, node, workers, options.keep, started)
}

fn run_steps(
    screen: &mut Screen,
    node: &Node,
    workers: &[Worker],
    binaries: &Binaries,
    options: &Options,
) -> Result<()> {
    let picture = options.dashboard.as_deref();
    // The node that is cut off later should not have the leader.
    let last = workers.last().map(Worker::name);
    let set_schedulable = |verb| match last {
        Some(name) => node.plane.kubectl(&[verb, name]).map(drop),
        None => Ok(()),
    };
    set_schedulable("cordon")?;
    let overlay = picture.map(|_| dashboard::overlay(node)).transpose()?;
    install(screen, node, binaries, overlay.as_deref())?;
    set_schedulable("uncordon")?;
    let recording = picture.map(|_| dashboard::Recording::start(node)).transpose()?;
    show_all(screen, node, workers)?;
    if let (Some(recording), Some(picture)) = (recording, picture) {
        if workers.is_empty() {
            let step = screen.begin_step("Go on with small jobs and requests for three minutes")?;
            recording.keep_busy(node)?;
            screen.end_step(step, "")?;
        }
        let step = screen.begin_step("Draw the dashboard with what Prometheus has scraped")?;
        recording.draw(picture)?;
        screen.end_step(step, &picture.display().to_string())?;
    }
    Ok(())
}

fn show_all(screen: &mut Screen, node: &Node, workers: &[Worker]) -> Result<()> {
    if !workers.is_empty() {
        fleet::show(screen, node, workers)?;
        return show_objects(screen, node, &["imagepulljobs,nodeimages"]);
    }
    pull::show(screen, node)?;
    recreate::show(screen, node)?;
    rollout::show(screen, node)?;
    sidecar::show(screen, node)?;
    show_objects(
        screen,
        node,
        &[
            "imagepulljobs,nodeimages",
            "containerrecreaterequests",
            "clonesets,sidecarsets,pods",
        ],
    )
}

/// Waits for the release build, which may be done already.
fn wait_for_build(
    screen: &mut Screen,
    building: JoinHandle<Result<Binaries>>,
    lines: mpsc::Receiver<String>,
) -> Result<Binaries> {
    let step = screen.begin_long_step(
        "Build the two programs, static, as a release",
        " (some minutes the first time)",
    )?;
    for line in lines {
        step.update(&line, line.starts_with("Blocking"));
    }
    let binaries = building
        .join()
        .map_err(|_| anyhow!("the release build panicked"))??;
    let mebibytes = |name| {
        binaries
            .size(name)
            .map(|b| format!("{:.1} MiB", b as f64 / 1_048_576.0))
    };
    let note = format!(
        "daemon {}, manager {}",
        mebibytes("kruise-daemon")?,
        mebibytes("kruise-manager")?
    );
    screen.end_step(step, &note)?;
    Ok(binaries)
}

fn start_node(screen: &mut Screen) -> Result<Node> {
    let step = screen.begin_step("Start etcd, Kubernetes, containerd and a registry")?;
    let node = Node::start()?;
    let release = cluster::kubernetes::release()?;
    let containerd = node.runtime.ctr(&["version"])?;
    let containerd = containerd
        .lines()
        .find_map(|l| l.trim().strip_prefix("Version:"))
        .unwrap_or("?")
        .trim();
    let runc = run_program("runc", &["--version"])?;
    let runc = runc
        .lines()
        .next()
        .and_then(|l| l.split(' ').nth(2))
        .unwrap_or("?");
    screen.end_step(
        step,
        &format!("Kubernetes {release}, containerd {containerd}, runc {runc}; node Ready"),
    )?;
    Ok(node)
}

fn start_workers(screen: &mut Screen, first: &Node, count: usize) -> Result<Vec<Worker>> {
    if count == 0 {
        return Ok(Vec::new());
    }
    let names = &WORKERS[..count];
    let step = screen.begin_step("Add nodes, each with its own containerd, kubelet and network")?;
    let workers = names
        .iter()
        .map(|name| first.add_worker(name))
        .collect::<Result<_>>()?;
    screen.end_step(step, &format!("{} Ready", names.join(", ")))?;
    Ok(workers)
}

/// Installs `deploy/default`, or an overlay of it.
fn install(screen: &mut Screen, node: &Node, binaries: &Binaries, overlay: Option<&Path>) -> Result<()> {
    let step =
        screen.begin_step("Put images into the registry: ours (one binary each) and stand-ins to pull")?;
    let name = if overlay.is_some() {
        "OVERLAY"
    } else {
        "deploy/default"
    };
    let deploy = overlay.map_or_else(
        || repository_path("deploy/default"),
        |overlay| overlay.display().to_string(),
    );
    binaries.push(
        &node.runtime.registry,
        &node.plane.kubectl(&["kustomize", &deploy])?,
    )?;
    node.runtime.registry.push(
        PULLED_IMAGE.0,
        &Image::busybox().random(PULLED_IMAGE.1).cmd(["sh"]),
    )?;
    for (name, size) in [rollout::UPDATE_IMAGE, sidecar::EMPTY_IMAGE] {
        let image = Image::busybox().random(size).cmd(["sh"]);
        node.runtime.registry.push(name, &image)?;
    }
    screen.end_step(step, "")?;

    screen.command(&format!("kubectl apply -k {name}"))?;
    let applied = node.plane.kubectl(&["apply", "-k", &deploy])?;
    let step = screen.begin_step("Wait for the DaemonSet and the Deployments")?;
    for workload in [
        "daemonset/kruise-daemon",
        "deployment/kruise-manager",
        "deployment/kruise-webhook",
    ] {
        let wait = [
            "rollout",
            "status",
            "-n",
            "kruise-system",
            workload,
            "--timeout=120s",
        ];
        node.plane.kubectl(&wait)?;
    }
    screen.end_step(
        step,
        &format!("{} objects applied, all Pods ready", applied.lines().count()),
    )?;
    let pods = node.plane.kubectl(&["get", "pods", "-n", "kruise-system"])?;
    screen.block(&pods)
}

/// What an operator would check when the programs do not become ready.
fn diagnostics(node: &Node) -> String {
    let kubectl = |args: &[&str]| node.plane.kubectl(args).unwrap_or_else(|e| e.to_string());
    let pods = kubectl(&["get", "pods", "-A", "-o", "wide"]);
    let events = kubectl(&["get", "events", "-n", "kruise-system", "--sort-by=.lastTimestamp"]);
    let log = |app: &str| kubectl(&["logs", "-n", "kruise-system", "-l", app, "--tail=15", "--prefix"]);
    let logs = ["daemon", "controller-manager", "webhook"].map(|part| log(&format!("control-plane={part}")));
    format!("{pods}\n{events}\n{}", logs.join("\n"))
}

fn show_objects(screen: &mut Screen, node: &Node, shown_kinds: &[&str]) -> Result<()> {
    for kinds in shown_kinds {
        screen.command(&format!("kubectl get {kinds}"))?;
        screen.block(&node.plane.kubectl(&["get", kinds])?)?;
    }
    Ok(())
}

fn keep_running(node: Node, workers: Vec<Worker>) -> Result<()> {
    for worker in workers {
        worker.keep_running(KEPT_BY)?;
    }
    node.keep_running(KEPT_BY)
}

fn shut_down(
    screen: &mut Screen,
    node: Node,
    workers: Vec<Worker>,
    keep: bool,
    started: Instant,
) -> Result<()> {
    let seconds = started.elapsed().as_secs_f64();
    if keep {
        screen.line(&format!(
            "The cluster stays (after {seconds:.0} s). To look around, and to end it:"
        ))?;
        screen.line(&format!(
            "  export KUBECONFIG={}",
            node.plane.kubeconfig().display()
        ))?;
        screen.line("  cargo xtask demo --down")?;
        return keep_running(node, workers);
    }
    let step = screen.begin_step("End everything")?;
    let mut beds = vec![(node.plane.dir().to_owned(), node.plane.apiserver.pid()?)];
    for worker in &workers {
        beds.push((worker.dir().to_owned(), worker.kubelet.pid()?));
    }
    drop((workers, node));
    for (dir, process) in beds {
        check_clean(&dir, process.as_raw())?;
    }
    screen.end_step(step, "no process, mount, namespace or bridge left")?;
    screen.line(&format!(
        "All of it took {:.0} s.",
        started.elapsed().as_secs_f64()
    ))
}

fn check_clean(dir: &Path, process: i32) -> Result<()> {
    let name = dir.file_name().context("the bed has no name")?.to_string_lossy();
    wait::until("the end of all processes", Duration::from_secs(10), || {
        Ok((!Path::new(&format!("/proc/{process}/exe")).exists()).then_some(()))
    })?;
    ensure!(!dir.exists(), "{} is still there", dir.display());
    ensure!(
        !std::fs::read_to_string("/proc/mounts")?.contains(&*name),
        "a mount is left"
    );
    let groups = cgroups_named(&name)?;
    ensure!(groups.is_empty(), "cgroups are left: {groups:?}");
    Ok(())
}

fn repository_path(relative: &str) -> String {
    repository_dir().join(relative).display().to_string()
}

/// Starts a program that prints what it observes; its errors are not shown. It ends with this process, however that
/// ends.
fn spawn_with_output(program: &Command) -> Result<(Child, ChildStdout)> {
    let mut child = with_parent_death_signal(program)
        // Kept open until we close it: the program behind `kubectl exec -i` ends with its input.
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::null())
        .spawn()?;
    let output = child.stdout.take().context("no output")?;
    Ok((child, output))
}

/// Applies an example as the user would.
fn apply(screen: &mut Screen, node: &Node, example: &str) -> Result<Instant> {
    let file = format!("deploy/examples/{example}");
    screen.command(&format!("kubectl apply -f {file}"))?;
    let applied_at = Instant::now();
    run_command(
        node.plane
            .kubectl_command()
            .args(["apply", "-f", &repository_path(&file)]),
    )?;
    Ok(applied_at)
}

#[cfg(test)]
mod tests {
    #[test]
    fn readme_quotes_the_demo_recording() {
        let recorded = include_str!("../../../docs/user/demo.txt");
        let quoted = include_str!("../../../README.md")
            .split("```")
            .find(|block| block.contains("$ kubectl apply -f deploy/examples/imagepulljob.yaml"));
        assert!(
            quoted.is_some_and(|block| recorded.contains(block.trim())),
            "the README's excerpt is not in docs/user/demo.txt: {quoted:?}"
        );
    }
}
