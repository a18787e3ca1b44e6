//! The commands on a real node, with our daemon and manager: nothing is played.

use testbed::cluster::NODE_NAME;

use serde_json::json;

use crate::plugin::{Output, run_as};
use crate::workloads::shared_cluster;

#[tokio::test]
async fn commands_work_on_a_real_node() {
    let ns = shared_cluster().await;
    let kubeconfig = ns.cluster.node.plane.kubeconfig().to_owned();
    let run = async |args: &[&str]| -> Output {
        run_as(&kubeconfig, &[args, &["-n", &ns.namespace]].concat()).await
    };

    let output = run(&["pull", "busybox:1.36", "--nodes", NODE_NAME])
        .await
        .expect(0);
    assert!(
        output.stdout.ends_with("busybox:1.36 is on 1 node(s)\n"),
        "{output:?}"
    );
    let node = run(&["node", NODE_NAME, "-o", "json"]).await.expect(0).json();
    assert_eq!((&node["pulls"], &node["pulled"]), (&json!([]), &json!(1)));

    ns.create_settled_set("web", json!({})).await;
    let restarts = async || -> Vec<i64> {
        let pods = ns.pods_of("web").await;
        let restarts = pods
            .values()
            .map(|pod| &pod["status"]["containerStatuses"][0]["restartCount"]);
        restarts.map(|count| count.as_i64().unwrap()).collect()
    };
    let output = run(&["restart", "clone/web", "-c", "app", "--max-unavailable", "2"])
        .await
        .expect(0);
    assert!(output.stdout.ends_with("3 of 3 Pod(s) restarted\n"), "{output:?}");
    assert_eq!(restarts().await, [1, 1, 1]);

    let update = json!({ "updateStrategy": { "rollingUpdate": { "maxUnavailable": "100%" } } });
    ns.set_image_and_spec("web", "kruise-test/term:2", update).await;
    run(&["rollout", "status", "clone/web"]).await.expect(0);
    run(&["rollout", "undo", "clone/web"]).await.expect(0);
    let output = run(&["rollout", "status", "clone/web"]).await.expect(0);
    assert!(
        output
            .stdout
            .ends_with("cloneset \"web\" successfully rolled out\n"),
        "{output:?}"
    );
    let image = &ns.pods_of("web").await.into_values().next().unwrap()["spec"]["containers"][0]["image"];
    assert_eq!(image, "kruise-test/term:1");
    let history = run(&["rollout", "history", "clone/web", "-o", "json"])
        .await
        .expect(0)
        .json();
    assert_eq!(history["revisions"][1]["currentRevision"], true, "{history}");
}
