//! Text of users is data for policies, never code.

use serde_json::{Value, json};

use crate::cluster::InjectionCluster;
use crate::stored::{Stored, compile_all, inject_all};

const TEXTS: [&str; 12] = [
    "'",
    "\"",
    "\\",
    "\\'",
    "' + string(object.spec.containers.size()) + '",
    "'), JSONPatch{op: 'remove', path: '/spec/containers/0'}] + [JSONPatch{op: 'add', path: '/x', value: ('",
    "${object.metadata.name} $(A) {{ .Values }} %s",
    "\\u0027 \\x27 \\047 \\n",
    "line\nnext\r\ttab \u{1} \u{7f} \u{85} \u{2028} \u{feff}",
    "<script>&amp;</script> \u{1f600} e\u{301} \u{10ffff}",
    "r'raw' b'bytes' '''three''' \"\"\"",
    "dyn(variables.main) // comment",
];

fn env() -> Vec<Value> {
    let numbered = TEXTS.iter().enumerate();
    numbered
        .map(|(at, text)| json!({ "name": format!("TEXT_{at}"), "value": text }))
        .collect()
}

fn set_of_texts() -> Stored {
    let annotation = |policy: &str| {
        let numbered = TEXTS.iter().enumerate();
        let annotations: serde_json::Map<String, Value> = numbered
            .map(|(at, text)| (format!("{policy}/text-{at}"), json!(text)))
            .collect();
        json!({ "annotations": annotations, "patchPolicy": policy })
    };
    let numbered = TEXTS.iter().enumerate();
    let items: Vec<Value> = numbered
        .map(|(at, text)| json!({ "key": text, "path": format!("p{at}") }))
        .collect();
    Stored::with_policy(&json!({
        "metadata": { "name": "texts", "annotations": {
            "kruise.io/sidecarset-hash": TEXTS[5], "kruise.io/sidecarset-hash-without-image": TEXTS[8],
        } },
        "status": { "latestRevision": TEXTS[1] },
        "spec": {
            "selector": { "matchLabels": { "app": "texts" } },
            "patchPodMetadata": [annotation("Retain"), annotation("Overwrite")],
            "volumes": [{ "name": "v", "configMap": { "name": "c", "items": items } }],
            "containers": [{
                "name": "agent", "image": "i", "args": TEXTS, "command": TEXTS, "env": env(),
                "workingDir": TEXTS[4], "livenessProbe": { "exec": { "command": TEXTS } },
                "volumeMounts": [{ "name": "v", "mountPath": "/v", "subPathExpr": "$(TEXT_0)" }],
                "transferEnv": [{ "sourceContainerName": TEXTS[4], "envNames": TEXTS }],
            }],
        },
    }))
}

fn agent(pod: &Value) -> &Value {
    let mut containers = pod["spec"]["containers"].as_array().unwrap().iter();
    containers.find(|container| container["name"] == "agent").unwrap()
}

#[tokio::test]
async fn text_of_users_is_data() {
    let Some(cluster) = InjectionCluster::start_with_policies().await else {
        return;
    };
    let sets = [set_of_texts()];
    // A Pod may hold the same texts, which policies read.
    let annotations =
        json!({ "kruise.io/sidecarset-hash": TEXTS[5], "kruise.io/sidecarset-injected-list": TEXTS[4] });
    let labels = json!({ "app": "texts" });
    let main = json!({ "name": "main", "image": "i", "args": TEXTS, "env": env() });
    let pod = json!({
        "metadata": { "name": "p", "namespace": "default", "labels": labels, "annotations": annotations },
        "spec": { "containers": [main] },
    });
    let mut stored = cluster.mutate(&pod).await.unwrap();
    // Policies replace what is no record.
    let annotations = stored["metadata"]["annotations"].as_object_mut().unwrap();
    annotations.remove("kruise.io/sidecarset-hash");
    let expected = inject_all(&sets, &stored);
    cluster.install(compile_all(&sets)).await;
    let actual = cluster.mutate(&pod).await.unwrap();

    for field in ["args", "command", "env", "workingDir", "volumeMounts"] {
        assert_eq!(agent(&actual)[field], agent(&expected)[field], "{field}");
    }
    let probe = "livenessProbe";
    assert_eq!(agent(&actual)[probe]["exec"], agent(&expected)[probe]["exec"]);
    assert_eq!(actual["spec"]["containers"].as_array().unwrap().len(), 2);
    let items = "/spec/volumes/0/configMap/items";
    assert_eq!(actual.pointer(items), expected.pointer(items));
    let expected = expected["metadata"]["annotations"].to_string();
    let expected = expected.replace(r#"\"1970-01-01T00:00:00Z\""#, "null");
    assert_eq!(actual["metadata"]["annotations"].to_string(), expected);
}

/// The author of a Pod cannot keep a set away by annotations that take long to read.
#[tokio::test]
async fn large_annotations_do_not_stop_the_injection() {
    let Some(cluster) = InjectionCluster::start_with_policies().await else {
        return;
    };
    let set = json!({
        "metadata": { "name": "always" },
        "spec": {
            "selector": { "matchLabels": { "app": "always" } },
            "containers": [{ "name": "agent", "image": "i", "upgradeStrategy": {
                "upgradeType": "HotUpgrade", "hotUpgradeEmptyImage": "e" } }],
        },
    });
    cluster.install(compile_all(&[Stored::with_policy(&set)])).await;
    let record = |n: usize| {
        format!(r#""{n}":{{"updateTimestamp":null,"hash":"h","sidecarSetName":"s","sidecarList":["a"]}}"#)
    };
    let records = |count: usize| format!("{{{}}}", (0..count).map(record).collect::<Vec<_>>().join(","));
    let names = |count: usize| (0..count).map(|n| n.to_string()).collect::<Vec<_>>().join(",");
    let plain = |count: usize| {
        format!(
            "{{{}}}",
            (0..count)
                .map(|n| format!(r#""{n}":"h""#))
                .collect::<Vec<_>>()
                .join(",")
        )
    };
    for (hashes, listed, working) in [
        (records(190), names(240), plain(1700)),
        (plain(1700), ",".repeat(2000), plain(1700)),
        (records(800), names(10_000), plain(5000)),
        (
            format!("{{{}", "\"".repeat(16_000)),
            ",".repeat(60_000),
            "\\".repeat(16_000),
        ),
    ] {
        let annotations = json!({
            "kruise.io/sidecarset-hash": hashes,
            "kruise.io/sidecarset-hash-without-image": hashes,
            "kruise.io/sidecarset-injected-list": listed,
            "kruise.io/sidecarset-working-hotupgrade-container": working,
        });
        let metadata = json!({ "name": "p", "labels": { "app": "always" }, "annotations": annotations });
        let pod =
            json!({ "metadata": metadata, "spec": { "containers": [{ "name": "main", "image": "i" }] } });
        let start = std::time::Instant::now();
        let pod = cluster
            .mutate(&pod)
            .await
            .map_err(|why| why[why.len().saturating_sub(300)..].to_owned())
            .unwrap();
        println!("after {:?}", start.elapsed());
        let containers = pod["spec"]["containers"].as_array().unwrap();
        assert_eq!(containers.len(), 3, "{hashes:.100}");
    }
}
