//! The manifests in `deploy`, compared with each other and with the programs that they start.
#![allow(clippy::unwrap_used, clippy::panic)]

use std::collections::{BTreeMap, BTreeSet};
use std::process::Command;

use k8s_openapi::api::core::v1::ResourceQuota;
use k8s_openapi::api::networking::v1::NetworkPolicy;
use kruise_ops::metrics::{Metrics, Program};
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

/// Files of the workflows.
const WORKFLOWS: [&str; 2] = ["ci.yml", "release.yml"];

fn workflow(file: &str) -> Value {
    documents(&format!("../.github/workflows/{file}")).remove(0)
}

/// The steps of a job. A job that calls another workflow has none.
fn steps(job: &Value) -> impl Iterator<Item = &Value> {
    job["steps"].as_array().into_iter().flatten()
}

/// Build scripts of all crates run where cargo does. With a token that may write or sign, one of them could publish what
/// it likes under our name.
#[test]
fn jobs_that_write_or_sign_build_no_program() {
    let builds = [
        "cargo",
        "rustup",
        "xtask",
        "buildx build",
        "docker build",
        "buildah",
    ];
    let mut privileged = Vec::new();
    for file in WORKFLOWS {
        let workflow = workflow(file);
        assert_eq!(workflow["permissions"], json!({ "contents": "read" }), "{file}");
        for (name, job) in workflow["jobs"].as_object().unwrap() {
            let permissions = &job["permissions"];
            let may_write = match permissions.as_object() {
                Some(permissions) => permissions.values().any(|access| access != "read"),
                None => !permissions.is_null(),
            };
            if !may_write {
                continue;
            }
            privileged.push(name.clone());
            assert!(job["uses"].is_null() && job["container"].is_null(), "{name}");
            for step in steps(job) {
                let action = step["uses"].as_str().unwrap_or("actions/");
                assert!(action.starts_with("actions/"), "{name} uses {action}");
                let script = step["run"].as_str().unwrap_or_default();
                let build = builds.iter().find(|build| script.contains(*build));
                assert_eq!(build, None, "{name}: {script}");
            }
        }
    }
    let expected = ["draft", "publish-chart", "publish-images", "publish-plugin"];
    privileged.sort();
    assert_eq!(privileged, expected);
}

#[test]
fn checkouts_leave_no_credentials() {
    let mut checkouts = 0;
    for file in WORKFLOWS {
        for (name, job) in workflow(file)["jobs"].as_object().unwrap() {
            for step in steps(job) {
                if step["uses"]
                    .as_str()
                    .is_some_and(|action| action.starts_with("actions/checkout@"))
                {
                    assert_eq!(step["with"]["persist-credentials"], false, "{file}, job {name}");
                    checkouts += 1;
                }
            }
        }
    }
    assert!(checkouts > 5, "{checkouts}");
}

/// Tools that CI or a release installs have a version, and names of images are in lower case, whatever the owner's name
/// is.
#[test]
fn release_pins_tools_and_lowers_the_owner() {
    let workflow = workflow("release.yml");
    let steps = workflow["jobs"].as_object().unwrap().values().flat_map(steps);
    let scripts = steps.filter_map(|step| step["run"].as_str());
    let scripts = scripts.chain([include_str!("../.ci/run")]);
    let (mut tools, mut registries) = (0, 0);
    for line in scripts.flat_map(str::lines).map(str::trim) {
        if line.contains("cargo install ") || line.contains("go install ") {
            let tool = line.rsplit(' ').next().unwrap().trim_matches(['"', '$']);
            let tool = workflow["env"][tool].as_str().unwrap_or(tool);
            let (_, version) = tool.split_once('@').unwrap_or_else(|| panic!("{line}"));
            let digit = version.trim_start_matches('v').chars().next();
            assert!(digit.is_some_and(|c| c.is_ascii_digit()), "{line}: {version}");
            tools += 1;
        }
        if let Some(registry) = line.strip_prefix("registry=") {
            assert_eq!(registry, "ghcr.io/${GITHUB_REPOSITORY_OWNER,,}");
            registries += 1;
        }
    }
    assert_eq!((tools, registries), (7, 2));
    assert!(!workflow.to_string().contains("github.repository_owner"));
}

/// The notes of a release are about its version only, and their links also work outside the repository.
#[test]
fn release_notes_are_those_of_the_version() {
    let workflow = workflow("release.yml");
    let script = steps(&workflow["jobs"]["draft"]).find_map(|step| step["run"].as_str());
    // There is no release yet; the command that creates it prints its notes.
    let gh = r#"gh() { [ "$2" = create ] && cat "${@: -1}"; }"#;
    let script = format!("{gh}\n{}", script.unwrap());
    let folder = tempfile::tempdir().unwrap();
    let changelog = "# Changelog\n\n## v1.10.0\n\n* New, [a](docs/a.md#b), [c](https://c.example/d.md).\n\n## v1.1.0\n\n* Old\n";
    std::fs::write(folder.path().join("CHANGELOG.md"), changelog).unwrap();
    let output = Command::new("bash")
        .args(["-eo", "pipefail", "-c", &script])
        .current_dir(folder.path())
        .env("GITHUB_REF_NAME", "v1.10.0")
        .env("GITHUB_REPOSITORY", "owner/name")
        .output()
        .unwrap();
    let notes = String::from_utf8(output.stdout).unwrap();
    let expected =
        "* New, [a](https://github.com/owner/name/blob/v1.10.0/docs/a.md#b), [c](https://c.example/d.md).";
    assert_eq!((notes.trim(), output.status.success()), (expected, true));
}

/// Both images are described, and come with the licence.
#[test]
fn images_have_labels_and_the_license() {
    let dockerfile = include_str!("../Dockerfile");
    let described = dockerfile.split("\nFROM scratch AS described").nth(1).unwrap();
    let described = described.split("\nFROM ").next().unwrap();
    for label in ["source", "revision", "version", "licenses=Apache-2.0"] {
        assert!(
            described.contains(&format!("org.opencontainers.image.{label}")),
            "{label}"
        );
    }
    assert!(described.contains("\nCOPY LICENSE /LICENSE\n"));
    for program in ["kruise-daemon", "kruise-manager"] {
        assert!(
            dockerfile.contains(&format!("\nFROM described AS {program}\n")),
            "{program}"
        );
    }
    let workflow = workflow("release.yml").to_string();
    for argument in ["KRUISE_COMMIT", "IMAGE_SOURCE", "IMAGE_VERSION"] {
        assert!(described.contains(&format!("\nARG {argument}\n")), "{argument}");
        assert!(
            workflow.contains(&format!("--build-arg {argument}=")),
            "{argument}"
        );
    }
}

/// Some clusters admit Pods of critical priority only where a quota names that priority. The quota limits nothing.
#[test]
fn quota_admits_the_priorities_of_all_programs() {
    let quota = documents("default/resourcequota.yaml").remove(0);
    let quota: ResourceQuota = serde_json::from_value(quota).unwrap();
    let spec = quota.spec.unwrap();
    let hard: Vec<_> = spec
        .hard
        .unwrap()
        .into_iter()
        .map(|(name, limit)| (name, limit.0))
        .collect();
    assert_eq!(hard, [("pods".to_owned(), "1G".to_owned())]);
    let scopes = spec.scope_selector.unwrap().match_expressions.unwrap();
    assert!(spec.scopes.is_none() && scopes.len() == 1, "{scopes:?}");
    assert_eq!(
        (scopes[0].scope_name.as_str(), scopes[0].operator.as_str()),
        ("PriorityClass", "In")
    );
    let classes: BTreeSet<String> = scopes[0].values.clone().unwrap().into_iter().collect();
    let mut used = BTreeSet::new();
    for file in [
        "daemon/daemonset.yaml",
        "manager/deployment.yaml",
        "manager/webhook.yaml",
    ] {
        let workload = documents(file).remove(0);
        assert_eq!(
            workload["metadata"]["namespace"],
            json!(quota.metadata.namespace),
            "{file}"
        );
        let class = &workload["spec"]["template"]["spec"]["priorityClassName"];
        used.insert(class.as_str().unwrap().to_owned());
    }
    assert_eq!(classes, used);
}

/// The address of a Pod that has ended may belong to another Pod, which would get Prometheus' token.
#[test]
fn scrape_configuration_leaves_out_pods_that_have_ended() {
    let scrape = documents("observability/scrape.yaml").remove(0);
    let jobs = scrape["scrape_configs"].as_array().unwrap();
    assert_eq!(jobs.len(), 3);
    for job in jobs {
        let drop = json!({ "source_labels": ["__meta_kubernetes_pod_phase"], "regex": "Failed|Succeeded",
            "action": "drop" });
        assert!(
            job["relabel_configs"].as_array().unwrap().contains(&drop),
            "{}",
            job["job_name"]
        );
    }
}

/// A counter that appears with its first failure shows no increase for it, so that the alert would miss it.
#[test]
fn failed_reviews_of_each_webhook_are_counted_from_the_start() {
    let others = [("pod", "mutate"), ("other", "read"), ("other", "convert")];
    let mut expected = BTreeSet::from(others.map(|(kind, step)| (kind.to_owned(), step.to_owned())));
    for file in ["webhooks/mutating.yaml", "webhooks/validating.yaml"] {
        for configuration in documents(file) {
            for webhook in configuration["webhooks"].as_array().unwrap() {
                let path = webhook["clientConfig"]["service"]["path"].as_str().unwrap();
                let (step, kind) = path.trim_start_matches('/').split_once('-').unwrap();
                let kind = kind.trim_start_matches("apps-kruise-io-");
                expected.insert((kind.to_owned(), step.to_owned()));
            }
        }
    }
    for file in documents("crds/kustomization.yaml")[0]["resources"]
        .as_array()
        .unwrap()
    {
        let crd = documents(&format!("crds/{}", file.as_str().unwrap())).remove(0);
        if crd["spec"]["conversion"]["strategy"] == "Webhook" {
            let kind = crd["spec"]["names"]["singular"].as_str().unwrap();
            expected.insert((kind.to_owned(), "convert".to_owned()));
        }
    }
    let text = Metrics::sample(Program::Manager);
    let found = text.lines().filter_map(|line| {
        let labels = line
            .strip_prefix("kruise_reviews_total{")?
            .strip_suffix(",result=\"failed\"} 0")?;
        let (kind, step) = labels
            .strip_prefix("kind=\"")?
            .strip_suffix('"')?
            .split_once("\",step=\"")?;
        Some((kind.to_owned(), step.to_owned()))
    });
    assert_eq!(found.collect::<BTreeSet<_>>(), expected);
    assert!(expected.len() > 15, "{expected:?}");
}

/// Otherwise what exists only on Linux breaks the plugin's build on another system at the release.
#[test]
fn plugin_is_checked_on_each_system_of_a_release() {
    let (ci, release) = (workflow("ci.yml"), workflow("release.yml"));
    let runners = release["jobs"]["build-plugin"]["strategy"]["matrix"]["include"].as_array();
    let runners = runners.unwrap().iter().map(|include| &include["runner"]);
    let others: Vec<&Value> = runners
        .filter(|runner| !runner.as_str().unwrap().starts_with("ubuntu-"))
        .collect();
    assert!(!others.is_empty());
    for runner in others {
        let is_check = |step: &Value| step["run"] == "cargo check --locked --package kubectl-kruise";
        let mut jobs = ci["jobs"].as_object().unwrap().values();
        assert!(
            jobs.any(|job| job["runs-on"] == *runner && steps(job).any(is_check)),
            "{runner}"
        );
    }
}

/// A package of an old list may not exist any more.
#[test]
fn workflows_update_the_lists_of_packages_first() {
    let mut installs = 0;
    for file in WORKFLOWS {
        for step in workflow(file)["jobs"]
            .as_object()
            .unwrap()
            .values()
            .flat_map(steps)
        {
            let script = step["run"].as_str().unwrap_or_default();
            if let Some((before, _)) = script.split_once("apt-get install") {
                assert!(before.contains("apt-get update"), "{file}: {script}");
                installs += 1;
            }
        }
    }
    assert!(installs > 0);
}

/// A script sees the variables of its own step, of its job and of the workflow, and no others.
#[test]
fn workflow_scripts_use_variables_that_are_set() {
    let is_part = |c: &char| c.is_ascii_alphanumeric() || *c == '_';
    let mut used = 0;
    for file in WORKFLOWS {
        let workflow = workflow(file);
        for (job_name, job) in workflow["jobs"].as_object().unwrap() {
            for step in steps(job) {
                let Some(script) = step["run"].as_str() else {
                    continue;
                };
                let env = [&workflow["env"], &job["env"], &step["env"]];
                let env = env.into_iter().filter_map(Value::as_object).flatten();
                let mut set: BTreeSet<&str> = env.map(|(name, _)| name.as_str()).collect();
                let assigned = script.lines().filter_map(|line| line.trim().split_once('='));
                set.extend(assigned.map(|(name, _)| name));
                let loops = script.lines().filter_map(|line| line.trim().strip_prefix("for "));
                set.extend(loops.filter_map(|rest| rest.split(' ').next()));
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
