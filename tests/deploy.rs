//! The manifests in `deploy`, compared with each other and with the programs that they start.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use k8s_openapi::api::networking::v1::NetworkPolicy;
use serde::Deserialize;
use serde_json::{Value, json};

fn documents(file: &str) -> Vec<Value> {
    let path = format!("{}/../deploy/{file}", env!("CARGO_MANIFEST_DIR"));
    let text = std::fs::read_to_string(path).unwrap();
    let documents = serde_yaml::Deserializer::from_str(&text);
    documents
        .map(|document| Value::deserialize(document).unwrap())
        .collect()
}

fn container(workload: &Value) -> &Value {
    &workload["spec"]["template"]["spec"]["containers"][0]
}

/// Value of a container argument.
fn argument(workload: &Value, flag: &str) -> String {
    let args = container(workload)["args"].as_array().unwrap();
    let start = format!("--{flag}=");
    let value = args.iter().find_map(|arg| arg.as_str()?.strip_prefix(&start));
    value
        .unwrap_or_else(|| panic!("no {start} in {args:?}"))
        .to_owned()
}

#[test]
fn network_policies_match_deployments_and_ports() {
    let applied = &documents("manager/kustomization.yaml")[0]["resources"];
    assert!(applied.as_array().unwrap().contains(&json!("networkpolicy.yaml")));
    let policies = documents("manager/networkpolicy.yaml");
    let deployments =
        ["manager/deployment.yaml", "manager/webhook.yaml"].map(|file| documents(file).remove(0));
    assert_eq!(policies.len(), deployments.len());
    for (policy, deployment) in policies.iter().zip(&deployments) {
        let name = &deployment["metadata"]["name"];
        for field in ["name", "namespace"] {
            assert_eq!(policy["metadata"][field], deployment["metadata"][field]);
        }
        let policy: NetworkPolicy = serde_json::from_value(policy.clone()).unwrap();
        let spec = policy.spec.unwrap();
        assert_eq!(spec.policy_types.unwrap(), ["Ingress"], "{name}");
        let selected = spec.pod_selector.unwrap().match_labels.unwrap();
        let selects = deployments.iter().filter(|deployment| {
            let labels = deployment["spec"]["template"]["metadata"]["labels"].clone();
            let labels: BTreeMap<String, String> = serde_json::from_value(labels).unwrap();
            selected.iter().all(|(key, value)| labels.get(key) == Some(value))
        });
        let selects: Vec<_> = selects
            .map(|deployment| &deployment["metadata"]["name"])
            .collect();
        assert_eq!(selects, [name]);
        let rules = spec.ingress.unwrap();
        let open: BTreeSet<String> = rules
            .iter()
            .flat_map(|rule| rule.ports.iter().flatten())
            .map(|port| {
                assert_eq!(port.protocol.as_deref(), Some("TCP"));
                json!(port.port).as_str().unwrap().to_owned()
            })
            .collect();
        let ports = container(deployment)["ports"].as_array().unwrap();
        let ports: BTreeSet<String> = ports
            .iter()
            .map(|port| port["name"].as_str().unwrap().to_owned())
            .collect();
        assert_eq!(open, ports, "{name}");
        assert!(rules.iter().all(|rule| rule.from.is_none()), "{name}");
    }
}

/// Otherwise the owner of that name on a public registry would run as root on the node.
#[test]
fn manifest_images_name_no_public_registry() {
    for file in [
        "daemon/daemonset.yaml",
        "manager/deployment.yaml",
        "manager/webhook.yaml",
    ] {
        let workloads = documents(file);
        let images: Vec<_> = workloads
            .iter()
            .filter_map(|workload| container(workload)["image"].as_str())
            .collect();
        assert!(!images.is_empty(), "{file}");
        for image in images {
            assert!(image.starts_with("registry.invalid/"), "{file}: {image}");
        }
    }
}

/// A node can be drained in any state of our programs, and the API server does not call a webhook that has ended.
#[test]
fn pod_disruption_budgets_and_webhook_pre_stop() {
    let budgets = documents("manager/poddisruptionbudget.yaml");
    let policies: Vec<_> = budgets
        .iter()
        .map(|budget| budget["spec"]["unhealthyPodEvictionPolicy"].as_str())
        .collect();
    assert_eq!(policies, [Some("AlwaysAllow"); 2]);
    let webhook = documents("manager/webhook.yaml").remove(0);
    let pre_stop = container(&webhook)["lifecycle"]["preStop"]["sleep"]["seconds"].as_u64();
    let grace = webhook["spec"]["template"]["spec"]["terminationGracePeriodSeconds"].as_u64();
    assert!(pre_stop >= Some(5), "{pre_stop:?}");
    assert!(
        pre_stop.map(|pre_stop| pre_stop + 2) < grace,
        "{pre_stop:?} of {grace:?}"
    );
}

#[test]
fn probes_use_the_ports_programs_listen_on() {
    for folder in ["manager/deployment.yaml", "manager/webhook.yaml"] {
        let deployment = &documents(folder)[0];
        let container = container(deployment);
        let ports = container["ports"].as_array().unwrap();
        for (name, flag) in [("health", "health-probe-addr"), ("metrics", "metrics-addr")] {
            let port = ports.iter().find(|port| port["name"] == name).unwrap();
            let address = argument(deployment, flag);
            assert!(
                address.ends_with(&format!(":{}", port["containerPort"])),
                "{address}"
            );
        }
        for probe in ["livenessProbe", "readinessProbe"] {
            assert_eq!(container[probe]["httpGet"]["port"], "health");
            assert!(argument(deployment, "health-probe-addr").starts_with(':'));
        }
    }
    let daemons = &documents("daemon/daemonset.yaml")[0];
    for probe in ["livenessProbe", "readinessProbe"] {
        let get = &container(daemons)[probe]["httpGet"];
        let probed = format!("{}:{}", get["host"].as_str().unwrap(), get["port"]);
        assert_eq!(argument(daemons, "addr"), probed);
    }
}

/// Without it the binaries of an image do not know their commit: the build stage has no `.git`.
#[test]
fn docker_build_receives_the_commit() {
    let dockerfile = include_str!("../Dockerfile");
    let argument = dockerfile.find("\nARG KRUISE_COMMIT\n").unwrap();
    let build = dockerfile.find("cargo build").filter(|build| argument < *build);
    let stage = build.and_then(|build| dockerfile.get(argument..build));
    assert!(
        !stage.unwrap().contains("\nFROM "),
        "an argument ends with its stage"
    );
    for (file, text) in [
        ("Dockerfile", dockerfile),
        ("README.md", include_str!("../README.md")),
    ] {
        let builds: Vec<_> = text
            .lines()
            .filter(|line| line.contains("docker buildx build"))
            .collect();
        assert_eq!(builds.len(), 2, "{file}");
        for line in builds {
            assert!(
                line.contains(" --build-arg KRUISE_COMMIT=$COMMIT "),
                "{file}: {line}"
            );
        }
        assert!(text.contains("COMMIT=$(git rev-parse --short=12 HEAD)"), "{file}");
    }
}

#[test]
fn version_prints_program_and_commit() {
    for (name, path) in [
        ("kruise-daemon", support::binaries::daemon()),
        ("kruise-manager", support::binaries::manager()),
    ] {
        let output = Command::new(path).arg("--version").output().unwrap();
        let stdout = String::from_utf8(output.stdout).unwrap();
        let expected = format!("{name} {}\n", kruise_ops::VERSION_AND_COMMIT);
        assert_eq!((stdout, output.status.success()), (expected, true));
        assert!(kruise_ops::VERSION_AND_COMMIT.starts_with(concat!(env!("CARGO_PKG_VERSION"), " (commit ")));
    }
}

/// A script sees the variables of its own step, of its job and of the workflow, and no others.
#[test]
fn workflow_scripts_use_variables_that_are_set() {
    let is_part = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
    let mut used = 0;
    for file in ["ci.yml", "release.yml"] {
        let workflow = documents(&format!("../.github/workflows/{file}")).remove(0);
        for (job_name, job) in workflow["jobs"].as_object().unwrap() {
            // A job that calls another workflow has none.
            for step in job["steps"].as_array().into_iter().flatten() {
                let Some(script) = step["run"].as_str() else {
                    continue;
                };
                let env = [&workflow["env"], &job["env"], &step["env"]];
                let env = env.into_iter().filter_map(Value::as_object).flatten();
                let mut set: BTreeSet<&str> = env.map(|(name, _)| name.as_str()).collect();
                let assigned = script.lines().filter_map(|line| line.trim().split_once('='));
                set.extend(assigned.map(|(name, _)| name));
                for reference in script.split('$').skip(1).filter(|text| !text.starts_with("{{")) {
                    let name: String = reference
                        .trim_start_matches('{')
                        .chars()
                        .take_while(is_part)
                        .collect();
                    let is_known =
                        set.contains(name.as_str()) || name.starts_with("GITHUB_") || name == "PWD";
                    assert!(
                        is_known || name.is_empty(),
                        "{file}, job {job_name}: ${name} is not set"
                    );
                    used += usize::from(!name.is_empty());
                }
            }
        }
    }
    assert!(used > 10, "only {used} variables were found");
}
