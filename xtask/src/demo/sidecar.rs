//! The fourth part of the demo: sidecars in a new Pod, one updated in place and one upgraded hot.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, channel};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail, ensure};
use serde_json::Value;

use super::apply;
use super::screen::Screen;
use super::watch::{ContainerSnapshot, container_snapshot, pod_is_ready, watch_objects};
use testbed::cluster::Node;
use testbed::wait;

/// The image of containers that do not work, and the size in MiB of the stand-in that the bed serves under this name.
pub const EMPTY_IMAGE: (&str, usize) = ("library/busybox:1.36.1", 1);
/// The new image of both sidecars; the Pods of the CloneSet run it already.
const IMAGE: &str = "busybox:1.37";
/// Timeout of a step.
const TIMEOUT: Duration = Duration::from_secs(120);

/// A sidecar of the example Pod.
struct Sidecar {
    /// The SidecarSet, and its container.
    set: &'static str,
    /// Its containers in the Pod, with the images that they have after the update.
    containers: &'static [(&'static str, &'static str)],
}

/// Creates the example SidecarSets and a Pod that they select, changes their images, and shows what happens to the Pod.
pub fn show(screen: &mut Screen, node: &Node) -> Result<()> {
    apply(screen, node, "sidecarset.yaml")?;
    apply(screen, node, "sidecarset-hot-upgrade.yaml")?;
    wait_until_injected(node)?;
    let old = pod_names(node)?;
    screen.command("kubectl scale cloneset web --replicas=4")?;
    node.plane
        .kubectl(&["scale", "cloneset", "web", "--replicas=4"])?;
    let name = wait::until("the new Pod", TIMEOUT, || {
        Ok(pod_names(node)?.into_iter().find(|name| !old.contains(name)))
    })?;
    node.plane.kubectl(&[
        "wait",
        &format!("pod/{name}"),
        "--for=condition=Ready",
        "--timeout=60s",
    ])?;
    let containers: Vec<String> = snapshots(&pod(node, &name)?)
        .iter()
        .map(|(container, seen)| format!("{container} {}", seen.short_id()))
        .collect();
    screen.line(&format!("  {name}  containers {}, Ready", containers.join(", ")))?;
    screen.line("")?;

    let log = Sidecar {
        set: "log",
        containers: &[("log", IMAGE)],
    };
    update(screen, node, &name, &log)?;
    let agent = Sidecar {
        set: "agent",
        containers: &[("agent-1", "busybox:1.36.1"), ("agent-2", IMAGE)],
    };
    update(screen, node, &name, &agent)
}

/// Waits until a new Pod gets both sidecars.
fn wait_until_injected(node: &Node) -> Result<()> {
    let probe = [
        "run",
        "probe",
        "--image=busybox:1.36",
        "--labels=app=web",
        "--dry-run=server",
        "-o",
        "json",
    ];
    wait::until("the webhooks of the SidecarSets", TIMEOUT, || {
        let pod: Value = serde_json::from_str(&node.plane.kubectl(&probe)?)?;
        let containers = pod["spec"]["containers"].as_array().map_or(0, Vec::len);
        Ok((containers == 4).then_some(()))
    })
}

fn pod_names(node: &Node) -> Result<Vec<String>> {
    let names = node
        .plane
        .kubectl(&["get", "pods", "-l", "app=web", "-o", "name"])?;
    let names = names
        .lines()
        .map(|name| name.trim_start_matches("pod/").to_owned());
    Ok(names.collect())
}

fn pod(node: &Node, name: &str) -> Result<Value> {
    Ok(serde_json::from_str(
        &node.plane.kubectl(&["get", "pod", name, "-o", "json"])?,
    )?)
}

/// The containers of a Pod by name.
fn snapshots(pod: &Value) -> BTreeMap<String, ContainerSnapshot> {
    let statuses = pod["status"]["containerStatuses"]
        .as_array()
        .into_iter()
        .flatten();
    let entry = |status: &Value| {
        let name = status["name"].as_str().unwrap_or_default().to_owned();
        (name, container_snapshot(status))
    };
    statuses.map(entry).collect()
}

/// Changes the image of a sidecar, and shows its containers until the update is over.
fn update(screen: &mut Screen, node: &Node, pod_name: &str, sidecar: &Sidecar) -> Result<()> {
    let before = pod(node, pod_name)?;
    let (events_tx, events_rx) = channel();
    let mut watch_process = watch_objects(node, &["pod", pod_name, "--watch-only"], events_tx)?;
    let patch = format!(r#"[{{"op":"replace","path":"/spec/containers/0/image","value":"{IMAGE}"}}]"#);
    screen.command(&format!(
        "kubectl patch sidecarset {} --type=json -p '{patch}'",
        sidecar.set
    ))?;
    let start = Instant::now();
    node.plane
        .kubectl(&["patch", "sidecarset", sidecar.set, "--type=json", "-p", &patch])?;
    let result = show_events(screen, &events_rx, start, &before, sidecar);
    watch_process.kill().ok();
    watch_process.wait()?;
    result?;
    let after = pod(node, pod_name)?;
    ensure!(
        before["metadata"]["uid"] == after["metadata"]["uid"],
        "the Pod was replaced"
    );
    let app = |pod: &Value| snapshots(pod).remove("app").context("no container app");
    let (app_before, app_after) = (app(&before)?, app(&after)?);
    ensure!(
        app_before == app_after,
        "container app changed: before {app_before:?}, after {app_after:?}"
    );
    screen.line(&format!(
        "  the same Pod; container app {} keeps running",
        app_after.short_id()
    ))?;
    screen.line("")
}

/// Prints each change of the sidecar's containers.
fn show_events(
    screen: &mut Screen,
    events: &Receiver<Value>,
    start: Instant,
    before: &Value,
    sidecar: &Sidecar,
) -> Result<()> {
    let names = || sidecar.containers.iter().map(|(name, _)| *name);
    let mut last: BTreeMap<&str, String> = names().map(|name| (name, container_line(before, name))).collect();
    while start.elapsed() < TIMEOUT {
        let Ok(pod) = events.recv_timeout(Duration::from_secs(1)) else {
            continue;
        };
        for name in names() {
            let text = container_line(&pod, name);
            if last.get(name) != Some(&text) {
                screen.line(&format!("  {:6.2} s  {text}", start.elapsed().as_secs_f64()))?;
                last.insert(name, text);
            }
        }
        if is_updated(&pod, before, sidecar) {
            return screen.line("");
        }
    }
    bail!("SidecarSet {} was not updated within {TIMEOUT:?}", sidecar.set)
}

/// What a container runs, and its image in the spec if that differs.
fn container_line(pod: &Value, name: &str) -> String {
    let mut statuses = pod["status"]["containerStatuses"]
        .as_array()
        .into_iter()
        .flatten();
    let Some(status) = statuses.find(|status| status["name"] == name) else {
        return format!("{name}  has no container");
    };
    let seen = container_snapshot(status);
    let runs = status["image"].as_str().unwrap_or_default();
    let runs = runs.trim_start_matches("docker.io/library/");
    let requested = image(pod, name).filter(|image| *image != runs);
    let requested = requested.map_or_else(String::new, |image| format!(", to run {image}"));
    format!(
        "{name}  container {} {} with {runs}{requested}",
        seen.short_id(),
        seen.state
    )
}

fn image<'a>(pod: &'a Value, name: &str) -> Option<&'a str> {
    let mut containers = pod["spec"]["containers"].as_array().into_iter().flatten();
    containers.find(|container| container["name"] == name)?["image"].as_str()
}

/// Whether the containers of the sidecar run their new images, and the Pod is ready.
fn is_updated(pod: &Value, before: &Value, sidecar: &Sidecar) -> bool {
    let (old, now) = (snapshots(before), snapshots(pod));
    let mut containers = sidecar.containers.iter();
    containers.all(|(name, new_image)| {
        let replaced = old.get(*name).map(|old| &old.id) != now.get(*name).map(|now| &now.id);
        let runs = now.get(*name).is_some_and(|now| now.state == "running");
        image(pod, name) == Some(new_image) && replaced && runs
    }) && pod_is_ready(pod)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn update_ends_when_every_container_is_replaced() {
        let pod = |containers: [(&str, &str); 2]| {
            let spec = containers.map(|(image, _)| image);
            let name = |at: usize| ["agent-1", "agent-2"][at];
            let containers_spec: Vec<Value> = (0..2)
                .map(|at| json!({ "name": name(at), "image": spec[at] }))
                .collect();
            let statuses: Vec<Value> = (0..2)
                .map(|at| {
                    json!({ "name": name(at), "containerID": format!("containerd://{}", containers[at].1),
                        "image": "docker.io/library/old", "state": { "running": {} } })
                })
                .collect();
            json!({ "spec": { "containers": containers_spec }, "status": { "containerStatuses": statuses,
                "conditions": [{ "type": "Ready", "status": "True" }] } })
        };
        let sidecar = Sidecar {
            set: "agent",
            containers: &[("agent-1", "empty"), ("agent-2", IMAGE)],
        };
        let before = pod([("old", "a"), ("empty", "b")]);
        assert!(!is_updated(&before, &before, &sidecar));
        let second_works = pod([("old", "a"), (IMAGE, "c")]);
        assert!(!is_updated(&second_works, &before, &sidecar));
        let first_is_off = pod([("empty", "d"), (IMAGE, "c")]);
        assert!(is_updated(&first_is_off, &before, &sidecar));
        assert_eq!(
            container_line(&first_is_off, "agent-1"),
            "agent-1  container d running with old, to run empty"
        );
    }
}
