//! The third part of the demo: the Pods of a CloneSet get a new image and are not replaced.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::apply;
use super::screen::Screen;
use super::watch::{ContainerSnapshot, first_container, pod_is_ready, watch_objects};
use testbed::cluster::Node;

/// The new image of the Pods, and the size in MiB of the stand-in that the bed serves under this name.
pub const UPDATE_IMAGE: (&str, usize) = ("library/busybox:1.37", 4);
/// The image as users write it.
const IMAGE: &str = "busybox:1.37";
/// Timeout of a step.
const TIMEOUT: Duration = Duration::from_secs(120);

/// The parts of a Pod that a rollout must not change, and its container.
#[derive(Debug)]
struct PodSnapshot {
    uid: String,
    address: String,
    container: ContainerSnapshot,
}

/// Creates the example CloneSet, changes its image, and shows what happens to the Pods.
pub fn show(screen: &mut Screen, node: &Node) -> Result<()> {
    apply(screen, node, "cloneset.yaml")?;
    let before = wait_all_available(node)?;
    for (name, seen) in &before {
        screen.line(&format!(
            "  {name}  {}  container {}, Ready",
            seen.address,
            seen.container.short_id()
        ))?;
    }
    screen.line("")?;

    let (events_tx, events_rx) = channel();
    let mut watch_process = watch_objects(node, &["pods", "-l", "app=web", "--watch-only"], events_tx)?;
    let start = change_image(screen, node)?;
    let result = show_events(screen, &events_rx, start, &before);
    watch_process.kill().ok();
    watch_process.wait()?;
    result?;
    ensure_same_pods(&before, &wait_all_available(node)?)?;
    screen.line("  the same Pods, the same addresses, one restart of their container each")?;
    screen.line("")
}

/// Waits until the set's status reports all Pods available, and returns them by name.
fn wait_all_available(node: &Node) -> Result<BTreeMap<String, PodSnapshot>> {
    let wait = ["--for=condition=Ready", "--timeout=60s"];
    let count = r#"--for=jsonpath={.status.updatedAvailableReplicas}=3"#;
    node.plane
        .kubectl(&["wait", "cloneset/web", count, "--timeout=60s"])?;
    node.plane
        .kubectl(&[["wait", "pods", "-l", "app=web"].as_slice(), &wait].concat())?;
    let pods = node
        .plane
        .kubectl(&["get", "pods", "-l", "app=web", "-o", "json"])?;
    let pods: Value = serde_json::from_str(&pods)?;
    let pods = pods["items"].as_array().context("no list of Pods")?;
    Ok(pods.iter().map(|pod| (name(pod), pod_snapshot(pod))).collect())
}

fn name(pod: &Value) -> String {
    pod["metadata"]["name"].as_str().unwrap_or_default().to_owned()
}

fn pod_snapshot(pod: &Value) -> PodSnapshot {
    let text = |value: &Value| value.as_str().unwrap_or_default().to_owned();
    PodSnapshot {
        uid: text(&pod["metadata"]["uid"]),
        address: text(&pod["status"]["podIP"]),
        container: first_container(pod),
    }
}

fn change_image(screen: &mut Screen, node: &Node) -> Result<Instant> {
    let patch =
        format!(r#"[{{"op":"replace","path":"/spec/template/spec/containers/0/image","value":"{IMAGE}"}}]"#);
    screen.command(&format!("kubectl patch cloneset web --type=json -p '{patch}'"))?;
    let start = Instant::now();
    node.plane
        .kubectl(&["patch", "cloneset", "web", "--type=json", "-p", &patch])?;
    Ok(start)
}

/// Prints the events of each Pod until all run the new image.
fn show_events(
    screen: &mut Screen,
    events: &Receiver<Value>,
    start: Instant,
    before: &BTreeMap<String, PodSnapshot>,
) -> Result<()> {
    let mut last: BTreeMap<String, UpdateStep> = BTreeMap::new();
    while start.elapsed() < TIMEOUT {
        let Ok(pod) = events.recv_timeout(Duration::from_secs(1)) else {
            continue;
        };
        let name = name(&pod);
        let initial = before.get(&name);
        let initial = initial.with_context(|| format!("Pod {name} is none of those that were there"))?;
        let current_step = update_step(&pod, &initial.container);
        let last_step = last.get(&name).copied().unwrap_or(UpdateStep::Before);
        if current_step > last_step {
            let seconds = start.elapsed().as_secs_f64();
            screen.line(&format!(
                "  {seconds:6.2} s  {name}  {}",
                describe_step(current_step, &pod, initial)
            ))?;
            last.insert(name, current_step);
        }
        if last.len() == before.len() && last.values().all(|step| *step == UpdateStep::After) {
            return screen.line("");
        }
    }
    bail!("the Pods did not all run {IMAGE} within {TIMEOUT:?}; they came to {last:?}")
}

/// Progress of a Pod.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum UpdateStep {
    Before,
    ImageRequested,
    After,
}

fn update_step(pod: &Value, initial: &ContainerSnapshot) -> UpdateStep {
    let now = first_container(pod);
    if pod["spec"]["containers"][0]["image"] != IMAGE {
        return UpdateStep::Before;
    }
    if now.id != initial.id && now.state == "running" && pod_is_ready(pod) {
        return UpdateStep::After;
    }
    UpdateStep::ImageRequested
}

fn describe_step(step: UpdateStep, pod: &Value, initial: &PodSnapshot) -> String {
    match step {
        UpdateStep::Before | UpdateStep::ImageRequested => format!("out of service, to run {IMAGE}"),
        UpdateStep::After => {
            let now = first_container(pod);
            format!(
                "container {} -> {}, Ready again",
                initial.container.short_id(),
                now.short_id()
            )
        }
    }
}

fn ensure_same_pods(
    before: &BTreeMap<String, PodSnapshot>,
    after: &BTreeMap<String, PodSnapshot>,
) -> Result<()> {
    let identities = |pods: &BTreeMap<String, PodSnapshot>| -> Vec<(String, String, String)> {
        pods.iter()
            .map(|(name, seen)| (name.clone(), seen.uid.clone(), seen.address.clone()))
            .collect()
    };
    ensure!(
        identities(before) == identities(after),
        "Pods were replaced: before {before:?}, after {after:?}"
    );
    let restarted_once = after.values().all(|seen| seen.container.restarts == 1);
    ensure!(
        restarted_once,
        "not every container was restarted just once: {after:?}"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn update_step_follows_image_and_container() {
        let pod = |image: &str, id: &str, ready: &str| {
            json!({
                "spec": { "containers": [{ "image": image }] },
                "status": {
                    "conditions": [{ "type": "Ready", "status": ready }],
                    "containerStatuses": [{ "containerID": id, "state": { "running": {} } }],
                },
            })
        };
        let initial = first_container(&pod("busybox:1.36", "containerd://a", "True"));
        assert_eq!(
            update_step(&pod("busybox:1.36", "containerd://a", "True"), &initial),
            UpdateStep::Before
        );
        assert_eq!(
            update_step(&pod(IMAGE, "containerd://a", "False"), &initial),
            UpdateStep::ImageRequested
        );
        assert_eq!(
            update_step(&pod(IMAGE, "containerd://b", "False"), &initial),
            UpdateStep::ImageRequested
        );
        assert_eq!(
            update_step(&pod(IMAGE, "containerd://b", "True"), &initial),
            UpdateStep::After
        );
    }
}
