//! A client that only knows v1alpha1 in place of a node's daemon, with the daemon's real token. It works like
//! OpenKruise's daemon: one step per event, pull status by whole updates, requests by update and patch.

use futures::StreamExt;
use jiff::{SignedDuration, Timestamp};
use k8s_openapi::apimachinery::pkg::apis::meta::v1::Time;
use kruise_api::container_recreate_request::{
    ContainerRecreateRequestPhase as Phase, ContainerRecreateRequestSyncContainerStatus as Snapshot,
};
use kruise_api::node_image::{ImagePullPhase, ImageStatus, ImageTagSpec, ImageTagStatus, NodeImageStatus};
use kruise_api::v1alpha1::{
    ContainerRecreateRequest, ContainerRecreateRequestContainerRecreateState as State,
    ContainerRecreateRequestStatus, NodeImage,
};
use kruise_api::{keys, v1alpha1};
use kruise_cluster::Cluster;
use kube::api::{Api, Patch, PatchParams, PostParams};
use kube::runtime::watcher;
use kube::{Resource, ResourceExt};
use serde_json::json;
use testbed::cluster::TokenBinding;
use tokio::sync::mpsc::{UnboundedReceiver, UnboundedSender, unbounded_channel};
use tokio::sync::watch;
use tokio::task::JoinHandle;

use crate::test_cluster::{connect, shared_cluster};
use crate::waits::watch_events;

/// The daemon of a node, until dropped.
pub struct V1alpha1Daemon {
    /// IDs of the containers that it stops.
    pub stopped_containers: UnboundedReceiver<String>,
    /// Pulls stop at 40 % until this is true.
    pub allow_completion: watch::Sender<bool>,
    tasks: Vec<JoinHandle<()>>,
}

impl V1alpha1Daemon {
    /// Starts it with the daemon's account and a token bound to its node.
    pub async fn start(node: &'static str) -> Self {
        let config = shared_cluster()
            .plane
            .kubeconfig_for("kruise-system", "kruise-daemon", TokenBinding::Node(node))
            .unwrap();
        let cluster = connect(&config).await;
        let (stopped_tx, stopped) = unbounded_channel();
        let (pulls_may_end, allow_completion_rx) = watch::channel(false);
        let tasks = vec![
            tokio::spawn(run_image_pulls(cluster.clone(), node, allow_completion_rx)),
            tokio::spawn(run_recreate_requests(cluster, node, stopped_tx)),
        ];
        Self {
            stopped_containers: stopped,
            allow_completion: pulls_may_end,
            tasks,
        }
    }
}

impl Drop for V1alpha1Daemon {
    fn drop(&mut self) {
        for task in &self.tasks {
            task.abort();
        }
    }
}

/// A conflict means that another event follows; any other error fails the test.
fn ignore_conflict<T>(result: Result<T, kube::Error>) {
    match result {
        Err(kube::Error::Api(status)) if status.code == 409 => {}
        Err(why) => panic!("the daemon was refused: {why}"),
        Ok(_) => {}
    }
}

async fn run_image_pulls(
    cluster: Cluster,
    node: &'static str,
    mut allow_completion_rx: watch::Receiver<bool>,
) {
    let api: Api<NodeImage> = Api::all(cluster.client.clone());
    let field_selector = watcher::Config::default().fields(&format!("metadata.name={node}"));
    let mut events = std::pin::pin!(watch_events(api.clone(), field_selector));
    while let Some(event) = events.next().await {
        let (watcher::Event::Apply(mut image) | watcher::Event::InitApply(mut image)) = event else {
            continue;
        };
        let Some(status) = next_status(&image, Time(cluster.clock.now())) else {
            continue;
        };
        if status.succeeded + status.failed > 0
            && allow_completion_rx.wait_for(|allowed| *allowed).await.is_err()
        {
            return;
        }
        image.status = Some(status);
        let result = api.replace_status(node, &PostParams::default(), &image).await;
        ignore_conflict(result);
    }
}

/// The next step of the status: Waiting, Pulling, ended. None when all tags have ended.
fn next_status(image: &NodeImage, now: Time) -> Option<NodeImageStatus> {
    let before = image.status.clone().unwrap_or_default();
    let mut status = NodeImageStatus::default();
    for (name, spec) in &image.spec.images {
        let previous = |tag: &ImageTagSpec| {
            let all = &before.image_statuses.get(name)?.tags;
            let same = |s: &&ImageTagStatus| s.tag == tag.tag && s.version == tag.version;
            all.iter().find(same).cloned()
        };
        let tags: Vec<_> = spec
            .tags
            .iter()
            .map(|tag| next_tag_status(name, tag, previous(tag), &now))
            .collect();
        for tag in &tags {
            match tag.phase {
                ImagePullPhase::Waiting => status.waiting += 1,
                ImagePullPhase::Pulling => status.pulling += 1,
                ImagePullPhase::Succeeded => status.succeeded += 1,
                _ => status.failed += 1,
            }
        }
        status.desired += i32::try_from(tags.len()).unwrap();
        status.image_statuses.insert(name.clone(), ImageStatus { tags });
    }
    (status != before).then_some(status)
}

fn next_tag_status(
    name: &str,
    tag: &ImageTagSpec,
    previous: Option<ImageTagStatus>,
    now: &Time,
) -> ImageTagStatus {
    let Some(mut status) = previous else {
        return ImageTagStatus {
            tag: tag.tag.clone(),
            version: tag.version,
            phase: ImagePullPhase::Waiting,
            progress: 0,
            start_time: None,
            completion_time: None,
            image_id: None,
            message: None,
            bytes: None,
        };
    };
    match status.phase {
        ImagePullPhase::Waiting => {
            status.phase = ImagePullPhase::Pulling;
            status.progress = 40;
            status.start_time = Some(now.clone());
        }
        ImagePullPhase::Pulling => {
            status.completion_time = Some(now.clone());
            if tag.tag == "bad" {
                status.phase = ImagePullPhase::Failed;
                status.message = Some("no such image".into());
            } else {
                status.phase = ImagePullPhase::Succeeded;
                status.progress = 100;
                status.image_id = Some(format!("{name}@sha256:1"));
            }
        }
        _ => {}
    }
    status
}

async fn run_recreate_requests(cluster: Cluster, node: &'static str, stopped_tx: UnboundedSender<String>) {
    let api: Api<ContainerRecreateRequest> = Api::all(cluster.client.clone());
    let own_requests = format!("crr.apps.kruise.io/node-name={node},crr.apps.kruise.io/active=true");
    let mut events = std::pin::pin!(watch_events(
        api,
        watcher::Config::default().labels(&own_requests)
    ));
    while let Some(event) = events.next().await {
        let (watcher::Event::Apply(request) | watcher::Event::InitApply(request)) = event else {
            continue;
        };
        let done = request
            .status
            .as_ref()
            .is_some_and(|s| s.completion_time.is_some());
        if !done && request.meta().deletion_timestamp.is_none() {
            step_request(&cluster, request, &stopped_tx).await;
        }
    }
}

/// Executes one step of a request.
async fn step_request(
    cluster: &Cluster,
    mut request: ContainerRecreateRequest,
    stopped_tx: &UnboundedSender<String>,
) {
    let name = request.name_any();
    let api: Api<ContainerRecreateRequest> =
        Api::namespaced(cluster.client.clone(), &request.namespace().unwrap());
    let update = async |request: &ContainerRecreateRequest| {
        ignore_conflict(api.replace_status(&name, &PostParams::default(), request).await);
    };
    let status = request.status.clone().unwrap_or(ContainerRecreateRequestStatus {
        phase: Phase::Other(String::new()),
        completion_time: None,
        message: None,
        container_recreate_states: Vec::new(),
    });
    if status.phase != Phase::Recreating {
        request.status = Some(ContainerRecreateRequestStatus {
            phase: Phase::Recreating,
            ..status
        });
        return update(&request).await;
    }
    if !wait_for_grace_period(cluster, &request).await {
        return;
    }
    let states = next_states(&request, &status, stopped_tx);
    if states != status.container_recreate_states {
        let patch = json!({ "status": { "containerRecreateStates": states } });
        let result = api
            .patch_status(&name, &PatchParams::default(), &Patch::Merge(&patch))
            .await;
        return ignore_conflict(result);
    }
    if states.iter().all(|state| state.phase == Phase::Succeeded) {
        request.status = Some(ContainerRecreateRequestStatus {
            phase: Phase::Completed,
            completion_time: Some(Time(cluster.clock.now())),
            ..status
        });
        update(&request).await;
    }
}

/// Whether the Pod has been unready for the request's grace period; once it is unready, waits for the rest.
async fn wait_for_grace_period(cluster: &Cluster, request: &ContainerRecreateRequest) -> bool {
    let strategy = request.spec.0.strategy.clone().unwrap_or_default();
    let Some(grace) = strategy.unready_grace_period_seconds else {
        return true;
    };
    let Some(since) = request.annotations().get(keys::CRR_UNREADY_ACQUIRED) else {
        return false;
    };
    let since: Timestamp = since.parse().unwrap();
    let remaining = (since + SignedDuration::from_secs(grace)).duration_since(cluster.clock.now());
    if let Ok(remaining) = remaining.try_into() {
        tokio::time::sleep(remaining).await;
    }
    true
}

/// The next step of the container states; stops one container that is still pending.
fn next_states(
    request: &ContainerRecreateRequest,
    status: &ContainerRecreateRequestStatus,
    stopped_tx: &UnboundedSender<String>,
) -> Vec<State> {
    let snapshot: Vec<Snapshot> = request
        .annotations()
        .get(keys::CRR_SYNC_CONTAINER_STATUSES)
        .map(|text| serde_json::from_str(text).unwrap())
        .unwrap_or_default();
    let next_state =
        |container: &kruise_api::container_recreate_request::ContainerRecreateRequestContainer| {
            let old_id = &container.status_context.as_ref().unwrap().container_id;
            let state = |phase| v1alpha1::ContainerRecreateRequestContainerRecreateState {
                name: container.name.clone(),
                phase,
                message: None,
                is_killed: true,
                container_id: None,
            };
            let previous = status
                .container_recreate_states
                .iter()
                .find(|s| s.name == container.name);
            let new = snapshot
                .iter()
                .find(|s| s.name == container.name && s.ready && s.container_id.as_ref() != Some(old_id));
            match (previous, new) {
                (None, _) => {
                    stopped_tx.send(old_id.clone()).unwrap();
                    state(Phase::Recreating)
                }
                (Some(_), Some(_)) => state(Phase::Succeeded),
                (Some(known), None) => known.clone(),
            }
        };
    request.spec.0.containers.iter().map(next_state).collect()
}
