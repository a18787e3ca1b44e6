//! New nodes that have no NodeImage yet.

use kruise_api::image_pull_job::ImagePullJob;
use kruise_api::node_image::NodeImage;
use kube::api::Api;
use serde_json::json;

use crate::manager::Manager;
use crate::test_cluster::{
    PullOutcome, TestCluster, completed, create, create_node, job, jobs, report_pull, wait_for_tag,
    wait_until,
};

#[tokio::test]
async fn job_waits_for_nodeimage_of_new_ready_node() {
    let cluster = TestCluster::new();
    let mut manager = Manager::on_free_ports_with(
        &cluster.plane,
        "kruise-manager",
        &["--nodeimage-creation-delay=20s".into()],
    );
    manager.start().unwrap();
    manager.wait_for_readyz_text("leading");
    let admin = cluster.admin().await;
    let images = Api::<NodeImage>::all(admin.client.clone());
    create_node(&admin, "fresh", json!({ "pool": "new" }), true).await;
    create_node(&admin, "ill", json!({ "pool": "new" }), false).await;
    let selectors = [
        ("all", json!({})),
        ("named", json!({ "names": ["fresh"] })),
        ("labelled", json!({ "matchLabels": { "pool": "new" } })),
    ];
    for (name, selector) in &selectors {
        let spec = json!({ "image": format!("{name}:1"), "selector": selector, "parallelism": 9 });
        create(&jobs(&admin), job(name, spec)).await;
    }
    let is_waiting = |job: &ImagePullJob| {
        let conditions = job.status.iter().flat_map(|s| &s.conditions);
        let mut messages = conditions.map(|c| c.message.as_str());
        messages.any(|message| message == "waiting for the NodeImage of fresh")
    };
    for (name, _) in &selectors {
        let job = wait_until(&jobs(&admin), name, "waiting", is_waiting).await;
        assert!(!completed(&job), "{name} has ended without its node");
    }
    assert!(
        images.get_opt("fresh").await.unwrap().is_none(),
        "the job waited for nothing"
    );
    for image in ["all", "named", "labelled"] {
        wait_for_tag(&admin, "fresh", image, "1").await;
    }
    report_pull(&admin, "fresh", PullOutcome::Succeeded).await;
    for (name, _) in &selectors {
        let status = wait_until(&jobs(&admin), name, "ended", completed)
            .await
            .status
            .unwrap();
        assert_eq!((status.desired, status.succeeded), (1, 1), "{name}: {status:?}");
    }
}
