//! Rows on the probes of PodProbeMarkers.

use std::time::{Duration, Instant};

use anyhow::{Result, ensure};
use serde_json::{Value, json};

use crate::cluster::{self, NAMESPACE, NODE_POD_PROBE, POD, POD_PROBE_MARKER, ready};
use crate::side::Side;
use crate::usage::cpu;
use testbed::cluster::NODE_NAME;

/// Pods, and the probes of each, of which a PodProbeMarker has 32 at most; each has a period of a second.
const PODS: usize = 8;
const PROBES_OF_POD: usize = 25;
/// Those of a Pod that run a command: they cost the runtime more than the daemon, which shares two processors with it.
const COMMANDS_OF_POD: usize = 1;
const MEASURED_TIME: Duration = Duration::from_secs(30);

/// The share of a processor that the daemon takes for 200 probes a second whose results do not change.
pub async fn measure(side: &Side) -> Result<f64> {
    let labels = json!({ "app": "probed" });
    for index in 0..PODS {
        let server = "mkdir /www; echo up > /www/index.html; exec httpd -f -p 8080 -h /www";
        let containers = json!([{ "name": "app", "image": "busybox:1.36", "command": ["sh", "-c", server] }]);
        let pod = json!({ "metadata": { "name": format!("probed-{index}"), "labels": labels },
            "spec": { "containers": containers, "terminationGracePeriodSeconds": 0 } });
        cluster::create(&side.client, POD, Some(NAMESPACE), pod).await?;
    }
    for index in 0..PODS {
        let name = format!("probed-{index}");
        cluster::wait_until(&side.client, POD, Some(NAMESPACE), &name, ready).await?;
    }
    let probes: Vec<Value> = (0..PROBES_OF_POD).map(probe).collect();
    let marker = json!({ "metadata": { "name": "probed" },
        "spec": { "selector": { "matchLabels": labels }, "probes": probes } });
    cluster::create(&side.client, POD_PROBE_MARKER, Some(NAMESPACE), marker).await?;
    cluster::wait_until(&side.client, NODE_POD_PROBE, None, NODE_NAME, |object| {
        let pods = object["status"]["podProbeStatuses"]
            .as_array()
            .into_iter()
            .flatten();
        let states = pods.flat_map(|pod| pod["probeStates"].as_array().into_iter().flatten());
        states.filter(|state| state["state"] == "Succeeded").count() == PODS * PROBES_OF_POD
    })
    .await?;
    // The results are written, and the Pods are marked.
    tokio::time::sleep(Duration::from_secs(10)).await;
    let (start, used) = (Instant::now(), cpu(side, side.daemon)?);
    tokio::time::sleep(MEASURED_TIME).await;
    let (elapsed, used) = (start.elapsed(), cpu(side, side.daemon)?.saturating_sub(used));
    let pods = cluster::api(&side.client, POD, Some(NAMESPACE));
    let markers = cluster::api(&side.client, POD_PROBE_MARKER, Some(NAMESPACE));
    markers.delete("probed", &Default::default()).await?;
    for index in 0..PODS {
        pods.delete(&format!("probed-{index}"), &Default::default())
            .await?;
    }
    ensure!(!used.is_zero(), "the daemon has not run");
    Ok(used.as_secs_f64() / elapsed.as_secs_f64())
}

fn probe(index: usize) -> Value {
    let handler = match index {
        index if index < COMMANDS_OF_POD => json!({ "exec": { "command": ["true"] } }),
        index if index % 2 == 0 => json!({ "httpGet": { "path": "/", "port": 8080, "scheme": "HTTP" } }),
        _ => json!({ "tcpSocket": { "port": 8080 } }),
    };
    let mut probe = json!({ "periodSeconds": 1, "timeoutSeconds": 20 });
    json_patch::merge(&mut probe, &handler);
    json!({ "name": format!("p{index}"), "containerName": "app", "probe": probe,
        "podConditionType": format!("bench.example/p{index}") })
}
