//! What `kruise-daemon status` shows of environment restarts.

use super::plan::{PodMetaState, RestartState};
use crate::live::{self, LiveState};
use crate::pods::NodePod;
use kruise_cluster::Key;

/// The containers of a Pod that are being restarted or are waiting for a restart.
pub fn restart_rows(pod: &NodePod, memory: &PodMetaState) -> Vec<live::RestartStatus> {
    let containers = pod.containers.iter();
    let running = containers.filter_map(|view| Some((&view.name, &view.status.as_ref()?.container_id)));
    let rows = running.filter_map(|(name, id)| {
        let (step, waits_for) = restart_step(id, memory)?;
        Some(live::RestartStatus {
            namespace: pod.namespace.clone(),
            pod: pod.name.clone(),
            container: name.clone(),
            container_id: id.clone(),
            step: step.to_owned(),
            waits_for,
            hook_done: memory.hooks.get(id).and_then(|hook| hook.used_grace).is_some(),
        })
    });
    rows.collect()
}

fn restart_step(id: &str, memory: &PodMetaState) -> Option<(&'static str, Option<String>)> {
    Some(match memory.restarts.get(id) {
        Some(RestartState::Stopping(_)) => ("stopping", None),
        Some(RestartState::Stopped) => ("starting", Some("kubelet".to_owned())),
        Some(RestartState::Failed(tries, _)) => (
            "waiting",
            Some(format!("the next try to stop it, after {tries} that failed")),
        ),
        None if memory.waiting_since.kubelet_replace.contains_key(id) => (
            "waiting",
            Some("kubelet, which seems to replace it for its image".to_owned()),
        ),
        None => return None,
    })
}

/// Replaces the previous rows of a Pod with these rows.
pub fn publish(live: &LiveState, key: &Key, rows: Vec<live::RestartStatus>) {
    live.restarts.send_if_modified(|all| {
        live::replace_rows(all, rows, |row| {
            row.pod == key.name && Some(row.namespace.as_str()) == key.namespace.as_deref()
        })
    });
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::super::plan::HookProgress;
    use super::*;
    use crate::pods::{PodContainer, PodContainerStatus};

    #[test]
    fn restart_row_has_the_end_of_the_hook() {
        let id = "containerd://id".to_owned();
        let pod = NodePod {
            containers: vec![PodContainer {
                status: Some(PodContainerStatus {
                    container_id: id.clone(),
                    ..PodContainerStatus::default()
                }),
                ..PodContainer::default()
            }],
            ..NodePod::default()
        };
        for used_grace in [None, Some(Duration::ZERO)] {
            let hook = HookProgress {
                used_grace,
                interrupted: 0,
            };
            let memory = PodMetaState {
                restarts: [(id.clone(), RestartState::Failed(1, Duration::ZERO))].into(),
                hooks: [(id.clone(), hook)].into(),
                ..PodMetaState::default()
            };
            let rows = restart_rows(&pod, &memory);
            let ends: Vec<bool> = rows.iter().map(|row| row.hook_done).collect();
            assert_eq!(ends, [used_grace.is_some()]);
        }
    }

    fn row(pod: &str, step: &str) -> live::RestartStatus {
        live::RestartStatus {
            namespace: "n".into(),
            pod: pod.into(),
            step: step.into(),
            ..live::RestartStatus::default()
        }
    }

    #[test]
    fn restart_rows_of_a_pod_replace_its_former_ones() {
        let (live, one, other) = (
            LiveState::default(),
            Key::namespaced("n", "one"),
            Key::namespaced("n", "other"),
        );
        let mut changes = live.restarts.subscribe();
        publish(&live, &one, vec![row("one", "stopping")]);
        publish(&live, &other, vec![row("other", "stopping")]);
        publish(&live, &one, vec![row("one", "starting")]);
        assert_eq!(
            *live.restarts.borrow(),
            [row("other", "stopping"), row("one", "starting")]
        );
        changes.mark_unchanged();
        publish(&live, &one, vec![row("one", "starting")]);
        assert!(
            !changes.has_changed().is_ok_and(|changed| changed),
            "nothing has changed"
        );
        publish(&live, &one, Vec::new());
        assert_eq!(*live.restarts.borrow(), [row("other", "stopping")]);
    }
}
