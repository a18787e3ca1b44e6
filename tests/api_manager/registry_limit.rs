//! A manager with a limit of the nodes that pull from one registry.

use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::node_image::NodeImage;
use kube::api::{Api, ListParams};
use serde_json::json;

use crate::manager::Manager;
use crate::test_cluster::{
    PullOutcome, TestCluster, completed, create, create_nodes, job, jobs, report_pull, wait_for_tag,
    wait_until,
};

#[tokio::test]
async fn jobs_wait_for_each_other_at_a_registry() {
    let cluster = TestCluster::new();
    let args = ["--nodeimage-creation-delay=0s", "--max-pulls-per-registry=2"].map(str::to_owned);
    let mut manager = Manager::on_free_ports_with(&cluster.plane, "kruise-manager", &args);
    manager.start().unwrap();
    let admin = cluster.admin().await;
    let nodes = ["limit-1", "limit-2", "limit-3"];
    create_nodes(&admin, &nodes, json!({ "set": "limit" })).await;
    let jobs = jobs(&admin);
    let create_job = async |name: &str, image: &str| {
        let spec = json!({ "image": image, "parallelism": 9 });
        create(&jobs, job(name, spec)).await;
    };
    let requested = async |image: &str| {
        let images = Api::<NodeImage>::all(admin.client.clone());
        let all = images.list(&ListParams::default()).await.unwrap();
        all.items
            .iter()
            .filter(|object| object.spec.images.contains_key(image))
            .count()
    };
    create_job("first", "registry.example:5000/a:1").await;
    let active = |count| move |job: &ImagePullJob| job.status.as_ref().is_some_and(|s| s.active == count);
    wait_until(&jobs, "first", "two nodes at work", active(2)).await;
    create_job("second", "registry.example:5000/b:1").await;
    create_job("elsewhere", "docker.io/library/c:1").await;
    let waiting = |job: &ImagePullJob| {
        let status = job.status.as_ref();
        status.is_some_and(|status| status.conditions.iter().any(|c| c.reason == "RegistryLimit"))
    };
    let second = wait_until(&jobs, "second", "waiting", waiting).await;
    let message = "waiting for other jobs: 2 nodes pull from registry.example:5000, which is the limit \
        (--max-pulls-per-registry)";
    assert_eq!(second.status.unwrap().conditions[0].message, message);
    wait_until(&jobs, "elsewhere", "two nodes at work", active(2)).await;
    assert_eq!(requested("registry.example:5000/a").await, 2);
    assert_eq!(requested("registry.example:5000/b").await, 0);

    // The job without any node is the next one.
    wait_for_tag(&admin, "limit-1", "registry.example:5000/a", "1").await;
    report_pull(&admin, "limit-1", PullOutcome::Succeeded).await;
    wait_until(&jobs, "second", "one node at work", active(1)).await;
    assert_eq!(requested("registry.example:5000/a").await, 2);
    let names = ["first", "second", "elsewhere"];
    let all = async {
        for name in names {
            wait_until(&jobs, name, "ended", completed).await;
        }
    };
    let daemons = async {
        loop {
            for node in nodes {
                report_pull(&admin, node, PullOutcome::Succeeded).await;
            }
            tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        }
    };
    tokio::select! { () = all => {}, () = daemons => {} }
}
