//! ContainerRecreateJobs; the test plays kubelet and the daemon.

use std::collections::BTreeMap;
use std::time::Instant;

use kruise_api::container_recreate_job::ContainerRecreateJob;
use kruise_api::container_recreate_request::ContainerRecreateRequest;
use kube::ResourceExt;
use kube::api::{Api, ListParams};
use serde_json::json;

use crate::test_cluster::{
    WAIT_TIMEOUT, api, create, create_nodes, create_pod, merge_status, run_container, shared_cluster,
};

/// A job that plans while the request of another one is on its way must see it, or both restart a Pod at once.
#[tokio::test]
async fn jobs_for_the_same_pods_keep_one_budget() {
    let admin = shared_cluster().admin().await;
    let requests: Api<ContainerRecreateRequest> = api(&admin);
    let jobs: Api<ContainerRecreateJob> = api(&admin);
    create_nodes(&admin, &["n-budget"], json!({})).await;
    let names: Vec<String> = (0..6).map(|number| format!("budget-{number}")).collect();
    for name in &names {
        let labels = json!({ "budget": "one", "pod": name });
        create_pod(&admin, name, "n-budget", labels, false).await;
    }
    // In orders of their own; otherwise the next Pod of all would be the same.
    let job_names = ["budget-a", "budget-b", "budget-c"];
    for (number, name) in job_names.into_iter().enumerate() {
        let first = json!({ "matchLabels": { "pod": names[2 * number] } });
        let job = json!({ "metadata": { "name": name, "namespace": "default" }, "spec": {
            "selector": { "matchLabels": { "budget": "one" } }, "containers": [{ "name": "app" }],
            "maxUnavailable": 1, "podDeadlineSeconds": 600,
            "priorityStrategy": { "weightPriority": [{ "weight": 100, "matchSelector": first }] } } });
        create(&jobs, job).await;
    }
    let started = Instant::now();
    let mut restarts: BTreeMap<String, i32> = BTreeMap::new();
    loop {
        let all = requests.list(&ListParams::default()).await.unwrap().items;
        let is_open = |request: &&ContainerRecreateRequest| {
            let status = request.status.as_ref();
            names.contains(&request.spec.pod_name)
                && status.is_none_or(|status| status.completion_time.is_none())
        };
        let mut open: Vec<_> = all.iter().filter(is_open).collect();
        open.sort_by_key(|request| request.metadata.creation_timestamp.clone().map(|time| time.0));
        let pods: Vec<_> = open.iter().map(|request| request.spec.pod_name.clone()).collect();
        assert!(
            pods.iter().all(|pod| *pod == pods[0]),
            "maxUnavailable is 1, and these are being restarted: {pods:?}"
        );
        if let Some(first) = open.first() {
            let (request, pod) = (first.name_any(), first.spec.pod_name.clone());
            let count = restarts.entry(pod.clone()).or_default();
            *count += 1;
            run_container(&admin, &pod, &format!("containerd://{pod}-{count}"), *count).await;
            let now = admin.clock.now().strftime("%Y-%m-%dT%H:%M:%SZ").to_string();
            let states = json!([{ "name": "app", "phase": "Succeeded" }]);
            let status =
                json!({ "phase": "Completed", "completionTime": now, "containerRecreateStates": states });
            merge_status(&requests, &request, status).await;
        }
        let mut ended = 0;
        for name in job_names {
            let status = jobs.get(name).await.unwrap().status.unwrap_or_default();
            ended += usize::from(status.completion_time.is_some());
            assert_eq!(status.failed, 0, "{name}: {status:?}");
        }
        if ended == job_names.len() {
            break;
        }
        assert!(started.elapsed() < WAIT_TIMEOUT * 2, "{pods:?} {restarts:?}");
    }
    assert!(restarts.len() == names.len(), "{restarts:?}");
}
