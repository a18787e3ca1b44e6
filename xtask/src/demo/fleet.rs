//! The demo with several nodes: an ImagePullJob over all of them, one of which is cut off during its pull.

use std::collections::BTreeMap;
use std::sync::mpsc::Receiver;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::pull::{mebibytes, pull_progress, watch_daemon_status};
use super::screen::Screen;
use super::watch::pod_is_ready;
use super::{MEBIBITS_PER_SECOND, PULLED_IMAGE, apply};
use testbed::cluster::{Node, Worker};

/// Timeout of each part of the story. Kubernetes needs 50 s to see that a node is gone, and a connection that was cut
/// off tries again after a pause as long as the cut.
const TIMEOUT: Duration = Duration::from_secs(240);

/// What is shown of the job and of the nodes; a line is printed when it changes.
struct Story<'a> {
    screen: &'a mut Screen,
    first: &'a Node,
    start: Instant,
    shown: BTreeMap<String, String>,
}

/// Applies the example job, cuts off the last node half-way, and reconnects it when Kubernetes has noticed.
pub fn show(screen: &mut Screen, first: &Node, workers: &[Worker]) -> Result<()> {
    let last = workers.last().context("the demo needs a worker")?;
    first.runtime.limit_bandwidth(MEBIBITS_PER_SECOND)?;
    for worker in workers {
        worker.limit_bandwidth(first, MEBIBITS_PER_SECOND)?;
    }
    let daemon = first.plane.kubectl(&[
        "get",
        "pods",
        "--namespace=kruise-system",
        "--selector=control-plane=daemon",
        &format!("--field-selector=spec.nodeName={}", last.name()),
        "--output=name",
    ])?;
    let (mut watch, status) = watch_daemon_status(first, daemon.trim())?;
    let start = apply(screen, first, "imagepulljob.yaml")?;
    let mut story = Story {
        screen,
        first,
        start,
        shown: BTreeMap::new(),
    };
    let result = story.show(last, &status);
    watch.kill().ok();
    watch.wait()?;
    // The nodes may be kept.
    last.reconnect(first)?;
    first.runtime.remove_bandwidth_limit()?;
    for worker in workers {
        worker.remove_bandwidth_limit(first)?;
    }
    result?;
    let images = workers
        .iter()
        .map(|worker| worker.ctr(&["images", "list", "--quiet"]));
    for images in images.chain([first.runtime.ctr(&["images", "list", "--quiet"])]) {
        ensure!(
            images?.contains(PULLED_IMAGE.0),
            "the job succeeded but {} is not on each node",
            PULLED_IMAGE.0
        );
    }
    screen.line("")
}

impl Story<'_> {
    fn show(&mut self, last: &Worker, status: &Receiver<Value>) -> Result<()> {
        let (done, total) = self.until("half of the pull", |_| {
            let progress = status.try_iter().filter_map(|now| pull_progress(&now)).last();
            progress.filter(|(done, total)| done * 2 >= *total)
        })?;
        last.cut_off(self.first)?;
        let (done, total) = (mebibytes(done), mebibytes(total));
        self.line(last.name(), &format!("cut off at {done:.1} of {total:.1} MiB"))?;
        self.until("a node that is not ready", |state| {
            (!state.nodes_are_ready).then_some(())
        })?;
        last.reconnect(self.first)?;
        self.line(
            last.name(),
            "reconnected; TCP sends again after at most as long as the cut",
        )?;
        let status = self.until("the job's end", |state| {
            state.job["completionTime"].is_string().then(|| state.job.clone())
        })?;
        ensure!(
            status["succeeded"] == status["desired"] && status["succeeded"].as_u64() > Some(1),
            "the job ended with {status}"
        );
        Ok(())
    }

    /// Shows what changes until there is an answer.
    fn until<T>(&mut self, what: &str, mut answer: impl FnMut(&State) -> Option<T>) -> Result<T> {
        let start = Instant::now();
        while start.elapsed() < TIMEOUT {
            let state = State::read(self.first)?;
            for (subject, text) in &state.lines {
                if self.shown.get(subject) != Some(text) {
                    self.line(subject, text)?;
                    self.shown.insert(subject.clone(), text.clone());
                }
            }
            if let Some(answer) = answer(&state) {
                return Ok(answer);
            }
            thread::sleep(Duration::from_millis(200));
        }
        let objects = ["get", "imagepulljobs,nodeimages,nodes", "-o", "yaml"];
        bail!(
            "no {what} within {TIMEOUT:?}:\n{}",
            self.first.plane.kubectl(&objects)?
        )
    }

    fn line(&mut self, subject: &str, text: &str) -> Result<()> {
        let seconds = self.start.elapsed().as_secs_f64();
        self.screen
            .line(&format!("  {seconds:6.2} s  {subject:<8}{text}"))
    }
}

/// The job and the nodes at one time.
struct State {
    nodes_are_ready: bool,
    /// The job's status.
    job: Value,
    /// What to show, and of what.
    lines: Vec<(String, String)>,
}

impl State {
    fn read(first: &Node) -> Result<Self> {
        let list: Value = serde_json::from_str(&first.plane.kubectl(&[
            "get",
            "nodes,nodeimages,imagepulljobs",
            "--output=json",
        ])?)?;
        let items = list["items"].as_array().context("kubectl printed no list")?;
        let of_kind = |kind: &'static str| items.iter().filter(move |item| item["kind"] == kind);
        let mut lines: Vec<_> = of_kind("NodeImage")
            .filter_map(|node_image| {
                let name = node_image["metadata"]["name"].as_str()?;
                let ready =
                    of_kind("Node").any(|node| node["metadata"]["name"] == name && pod_is_ready(node));
                let suffix = if ready { "" } else { "; the node is NotReady" };
                Some((name.to_owned(), format!("{}{suffix}", pull_phase(node_image)?)))
            })
            .collect();
        let job = of_kind("ImagePullJob").next().map(|job| job["status"].clone());
        let job = job.unwrap_or_default();
        if let Some(text) = job_line(&job) {
            lines.push(("job".to_owned(), text));
        }
        Ok(Self {
            nodes_are_ready: of_kind("Node").all(pod_is_ready),
            job,
            lines,
        })
    }
}

/// Phase of the only pull.
fn pull_phase(node_image: &Value) -> Option<String> {
    let images = node_image["status"]["imageStatuses"].as_object()?;
    let tag = images.values().next()?["tags"].as_array()?.first()?;
    Some(tag["phase"].as_str()?.to_owned())
}

fn job_line(status: &Value) -> Option<String> {
    let count = |field: &str| status[field].as_u64().unwrap_or_default();
    let (succeeded, desired) = (count("succeeded"), status["desired"].as_u64()?);
    let conditions = status["conditions"].as_array().into_iter().flatten();
    let condition = conditions.last().map(|condition| {
        let text = |field: &str| condition[field].as_str().unwrap_or_default().to_owned();
        format!("; {}: {}", text("type"), text("message"))
    });
    let condition = condition.unwrap_or_default();
    Some(format!(
        "{succeeded} of {desired} nodes have the image{condition}"
    ))
}
