//! Containers that a policy injects.
//!
//! The containers are first written into a place beside the Pod's spec, take over there what they share with the Pod's
//! containers, whose indexes do not change meanwhile, and are then moved to their places, the last one first.

use std::collections::{BTreeMap, BTreeSet};

use k8s_openapi::api::core::v1::{LocalObjectReference, Volume};
use serde_json::{Value, json};

use kruise_api::container_hash::EnvOrigin;
use kruise_api::json::list_items;
use kruise_api::keys;
use kruise_api::sidecarset::{PodInjectPolicy, SidecarContainer};

use super::annotations::{Patches, value_of};
use super::error::Unsupported;
use super::options::Options;
use super::program::{self, Program};
use super::sets::Peers;
use super::{annotations, literal, records, resources, typed};
use crate::pod_admission::launch_priority::requested;
use crate::sidecarset::inject::revision::Selected;
use crate::sidecarset::recorded::{version_alt_key, version_key};
use crate::sidecarset::set::{name, names_in_pod};
use kruise_api::cel::{LABELS, string, strings};

/// Value of a policy that shares.
const ENABLED: &str = "enabled";

/// Adds everything but annotations. Returns the names of sidecars with hot upgrade.
pub(super) fn add(
    set: &Selected<'_>,
    patches: &Patches<'_>,
    peers: &Peers<'_>,
    options: &Options<'_>,
    program: &mut Program,
) -> Result<Vec<String>, Unsupported> {
    let lists = [
        List {
            field: "initContainers",
            id: "init",
            sorted: true,
            containers: set.spec.init_containers.as_deref().unwrap_or_default(),
        },
        List {
            field: "containers",
            id: "main",
            sorted: options.sort_containers,
            containers: set.spec.containers.as_deref().unwrap_or_default(),
        },
    ];
    if lists.iter().all(|list| list.containers.is_empty()) {
        return Err(Unsupported::new("spec.containers", "is empty"));
    }
    add_order(set.name, peers, program);
    for list in &lists {
        add_list(list, peers, program);
    }
    add_sources(program);
    let mut hot = Vec::new();
    let mut literals = Vec::new();
    let mut moves = Vec::new();
    for list in &lists {
        let mut places = Vec::new();
        for (at, container) in list.containers.iter().enumerate() {
            let field = format!("spec.{}[{at}]", list.field);
            let copies = copies(list, container, &field)?;
            if copies.len() > 1 {
                hot.push(name(container).to_owned());
            }
            for (number, copy) in copies.into_iter().enumerate() {
                let id = format!("{}{at}x{number}", list.id);
                let expression = literal::value(&copy.container, &field)?;
                literals.push(format!("'{id}': dyn({})", program.variable(&id, expression)));
                let injected = Injected {
                    set,
                    container,
                    id: &id,
                    field: &field,
                    copy: &copy,
                };
                injected.share(patches, peers, program)?;
                places.push(Place {
                    id,
                    name: copy.name,
                    in_front: copy.in_front,
                });
            }
        }
        moves.extend(list.moves(places, program));
    }
    let injected = format!(
        "[{}]",
        program::add("'/injected'", &format!("{{{}}}", literals.join(", ")))
    );
    // Before the operations that the sidecars themselves added.
    program.operations.insert(0, injected);
    let named = lists.iter().filter(|list| !list.containers.is_empty());
    let checks: Vec<String> = named.map(|list| list.check_names(set.name)).collect();
    program.operations.splice(0..0, checks);
    program.operations.append(&mut moves);
    program.operation("[JSONPatch{op: 'remove', path: '/injected'}]");
    add_volumes(set, program)?;
    add_pull_secrets(set, program)?;
    Ok(hot)
}

/// Containers of one kind.
struct List<'a> {
    field: &'static str,
    /// Begin of the names of its variables.
    id: &'static str,
    /// Sorts by name all that is injected; otherwise the containers of a set stay together.
    sorted: bool,
    containers: &'a [SidecarContainer],
}

/// A container as it is written before it takes anything over.
struct Copy {
    name: String,
    in_front: bool,
    container: Value,
    /// Variables that come last: name and path of a field.
    versions: Vec<(&'static str, String)>,
}

/// A container that is moved to its place.
struct Place {
    id: String,
    name: String,
    in_front: bool,
}

fn is_in_front(container: &SidecarContainer) -> bool {
    container.pod_inject_policy == Some(PodInjectPolicy::BeforeAppContainer)
}

/// The container, or two for hot upgrade: the first one works, the second has the empty image.
fn copies(list: &List<'_>, container: &SidecarContainer, field: &str) -> Result<Vec<Copy>, Unsupported> {
    let mut fields = container.container.clone();
    if container.resources_policy.is_some() {
        fields.insert("resources".to_owned(), json!({ "limits": {}, "requests": {} }));
    }
    let mut base = typed::container(&fields, field)?;
    if !list.is_init() && requested(&base).is_err() {
        // The Pod would be injected, whatever the failure policy is, and get no barriers.
        let why = "has a launch priority that is not an integer";
        return Err(Unsupported::new(&format!("{field}.env"), why));
    }
    kruise_api::json::append(
        &mut base,
        &["env"],
        json!({ "name": keys::ENV_IS_INJECTED, "value": keys::TRUE }),
    );
    for (shares, list) in [
        (shares_mounts(container), "volumeMounts"),
        (shares_devices(container), "volumeDevices"),
    ] {
        if shares {
            kruise_api::json::set_default(&mut base, &[list], json!([]));
        }
    }
    let in_front = is_in_front(container);
    let names = names_in_pod(container, list.is_init());
    let is_hot = names.len() > 1;
    let empty_image = &container.upgrade_strategy.hot_upgrade_empty_image;
    if is_hot && empty_image.is_empty() {
        let field = format!("{field}.upgradeStrategy.hotUpgradeEmptyImage");
        return Err(Unsupported::new(
            &field,
            "is empty, and the API server refuses containers without image",
        ));
    }
    let copies = names.into_iter().enumerate().map(|(number, name)| {
        let mut copy = base.clone();
        kruise_api::json::set(&mut copy, &["name"], json!(name));
        if number > 0 {
            kruise_api::json::set(&mut copy, &["image"], json!(empty_image));
        }
        let [version, alt] = keys::ENV_SIDECAR_SET_VERSIONS;
        let versions = [(version, version_key(&name)), (alt, version_alt_key(&name))];
        let versions = versions.into_iter().filter(|_| is_hot);
        Copy {
            versions: versions
                .map(|(variable, key)| (variable, format!("metadata.annotations['{key}']")))
                .collect(),
            name,
            in_front,
            container: copy,
        }
    });
    Ok(copies.collect())
}

fn shares_mounts(container: &SidecarContainer) -> bool {
    container.share_volume_policy.type_ == ENABLED
}

fn shares_devices(container: &SidecarContainer) -> bool {
    let policy = container.share_volume_device_policy.as_ref();
    policy.is_some_and(|policy| policy.type_ == ENABLED)
}

/// Variables with the containers of the sets that other policies injected: of all, and of those before this set.
fn add_order(set: &str, peers: &Peers<'_>, program: &mut Program) {
    let exceptions = peers.out_of_order();
    let mut before = records::is_before("e", set);
    if !exceptions.is_empty() {
        let exceptions = records::is_of("e", &exceptions);
        before = match peers.comes_first() {
            true => format!("{before} && !{exceptions}"),
            false => format!("{before} || {exceptions}"),
        };
    }
    program.variable("listed", records::listed("variables.others"));
    let before = format!("variables.others.filter(e, {before})");
    program.variable("listedBefore", records::listed(&before));
}

/// Variables about the containers of a list, and which of them other policies injected.
fn add_list(list: &List<'_>, peers: &Peers<'_>, program: &mut Program) {
    let id = list.id;
    let is_init = list.is_init();
    let all = if is_init {
        "object.spec.?initContainers.orValue([])"
    } else {
        "object.spec.containers"
    };
    let all = program.variable(id, all);
    let names = program.variable(format!("{id}Names"), format!("{all}.map(c, string(c.name))"));
    let indexes = program.variable(format!("{id}Indexes"), format!("lists.range({all}.size())"));
    let marked = program.variable(
        format!("{id}Marked"),
        format!(
            "{all}.map(c, c.?env.orValue([]).exists(e, e.name == {} && e.?value.orValue('') == {}))",
            string(keys::ENV_IS_INJECTED),
            string(keys::TRUE)
        ),
    );
    let name = format!("{names}[i]");
    let mut injected = records::lists_name("variables.listed", &name);
    if is_init {
        // Init containers that end are not listed.
        injected = format!(
            "({all}[i].?restartPolicy.orValue('') == 'Always' ? {injected} : variables.others.size() > 0)"
        );
    }
    let injected = program.variable(
        format!("{id}Injected"),
        format!("{indexes}.map(i, {marked}[i] && {injected})"),
    );
    let own = program.variable(format!("{id}Own"), format!("{indexes}.filter(i, !{injected}[i])"));
    if list.containers.is_empty() {
        return;
    }
    let front: BTreeSet<String> = peers
        .all()
        .flat_map(|(_, _, variant)| {
            let spec = &variant.selected.spec;
            let containers = if is_init {
                &spec.init_containers
            } else {
                &spec.containers
            };
            let front = containers
                .iter()
                .flatten()
                .filter(|container| is_in_front(container));
            front
                .flat_map(|container| names_in_pod(container, is_init))
                .collect::<Vec<_>>()
        })
        .collect();
    let front = strings(front.iter().map(String::as_str));
    let first = program.variable(
        format!("{id}First"),
        format!("{own}.size() > 0 ? {own}[0] : {indexes}.filter(i, {names}[i] in {front}).size()"),
    );
    program.variable(
        format!("{id}Last"),
        format!("{own}.size() > 0 ? {own}[{own}.size() - 1] : {first} - 1"),
    );
    if !list.sorted {
        let before = records::lists_name("variables.listedBefore", &name);
        program.variable(
            format!("{id}Before"),
            format!("{indexes}.map(i, {injected}[i] && {before})"),
        );
    }
}

impl List<'_> {
    fn is_init(&self) -> bool {
        self.field == "initContainers"
    }

    /// Operations that fail if a container of the Pod's other list has the name of one of these.
    fn check_names(&self, set: &str) -> String {
        let names = self.containers.iter();
        let names: Vec<String> = names
            .flat_map(|container| names_in_pod(container, self.is_init()))
            .collect();
        let names = strings(names.iter().map(String::as_str));
        let other = if self.is_init() { "main" } else { "init" };
        // The API server's error has the path.
        let absent =
            format!("/SidecarSet {set} and the Pod have a container and an init container of the same name");
        format!(
            "variables.{other}Own.exists(i, variables.{other}Names[i] in {names}) ? [JSONPatch{{op: 'remove', path: {}}}] : []",
            string(&absent)
        )
    }

    /// Operations that move the containers to their places.
    fn moves(&self, mut places: Vec<Place>, program: &mut Program) -> Vec<String> {
        if places.is_empty() {
            return Vec::new();
        }
        let id = self.id;
        let path = |index: &str| format!("'/spec/{}/' + string({index})", self.field);
        let mut operations = Vec::new();
        if self.field == "initContainers" {
            operations.push(
                "has(object.spec.initContainers) ? [] : [JSONPatch{op: 'add', path: '/spec/initContainers', value: []}]"
                    .to_owned(),
            );
        }
        if self.sorted {
            places.sort_by(|one, other| one.name.cmp(&other.name));
        }
        // A container of the same name is replaced; the later ones keep their indexes.
        for place in &places {
            let (name, from) = (string(&place.name), string(&format!("/injected/{}", place.id)));
            let index = format!("variables.{id}Names.lastIndexOf({name})");
            operations.push(format!(
                "{name} in variables.{id}Names ? [JSONPatch{{op: 'move', from: {from}, path: {}}}, JSONPatch{{op: 'remove', path: {}}}] : []",
                path(&index),
                path(&format!("{index} + 1"))
            ));
        }
        let (front, back): (Vec<_>, Vec<_>) = places.into_iter().partition(|place| place.in_front);
        let mut add = |places: Vec<Place>, start: &str, side: &str| {
            for place in places.into_iter().rev() {
                let name = string(&place.name);
                let is_before = match self.sorted {
                    true => format!("variables.{id}Names[i] < {name}"),
                    false => format!("variables.{id}Before[i]"),
                };
                let index = format!("{start}variables.{id}Indexes.filter(i, {side} && {is_before}).size()");
                let index = program.variable(format!("{}Index", place.id), index);
                operations.push(format!(
                    "{name} in variables.{id}Names ? [] : [JSONPatch{{op: 'move', from: {}, path: {}}}]",
                    string(&format!("/injected/{}", place.id)),
                    path(&index)
                ));
            }
        };
        add(
            back,
            &format!("variables.{id}Last + 1 + "),
            &format!("i > variables.{id}Last"),
        );
        add(front, "", &format!("i < variables.{id}First"));
        operations
    }
}

/// Variables with what sidecars may take over: for each thing its key, and the path that it is copied from.
fn add_sources(program: &mut Program) {
    let own = program.variable(
        "sources",
        "variables.mainIndexes.filter(i, !variables.mainMarked[i])",
    );
    for (variable, field, key) in [
        ("mounts", "volumeMounts", "mountPath"),
        ("devices", "volumeDevices", "devicePath"),
    ] {
        let all = format!(
            "{own}.map(i, lists.range(variables.main[i].?{field}.orValue([]).size()).map(j, {{'key': string(variables.main[i].{field}[j].{key}), 'from': '/spec/containers/' + string(i) + '/{field}/' + string(j)}})).flatten()"
        );
        add_firsts(variable, &all, program);
    }
    let variables = |key: &str| {
        format!(
            "lists.range(variables.main[i].?env.orValue([]).size()){key}.map(j, {{'container': variables.mainNames[i], 'key': string(variables.main[i].env[j].name), 'from': '/spec/containers/' + string(i) + '/env/' + string(j)}})"
        )
    };
    // Of several variables of the same name the last one counts.
    program.variable(
        "env",
        format!("variables.mainOwn.map(i, {}).flatten().reverse()", variables("")),
    );
    let name = "n.substring(2, n.size() - 1)";
    add_firsts(
        "mountEnv",
        &format!(
            "{own}.map(i, variables.main[i].?volumeMounts.orValue([]).map(m, m.?subPathExpr.orValue('').findAll({}).map(n, {}).flatten()).flatten()).flatten()",
            string(r"\$\([-._a-zA-Z][-._a-zA-Z0-9]*\)"),
            variables(&format!(".filter(j, variables.main[i].env[j].name == {name})"))
        ),
        program,
    );
}

/// A variable with those of `all` whose keys occur there for the first time.
fn add_firsts(name: &str, all: &str, program: &mut Program) {
    let all = program.variable(format!("{name}All"), all);
    let keys = program.variable(format!("{name}AllKeys"), format!("{all}.map(m, m.key)"));
    let firsts =
        format!("lists.range({all}.size()).filter(i, {keys}.indexOf({keys}[i]) == i).map(i, {all}[i])");
    program.variable(name, firsts);
}

/// A container beside the Pod's spec.
struct Injected<'a> {
    set: &'a Selected<'a>,
    container: &'a SidecarContainer,
    id: &'a str,
    field: &'a str,
    copy: &'a Copy,
}

impl Injected<'_> {
    /// Adds what it takes over from the Pod's containers.
    fn share(
        &self,
        patches: &Patches<'_>,
        peers: &Peers<'_>,
        program: &mut Program,
    ) -> Result<(), Unsupported> {
        let Self { container, id, .. } = self;
        let names = |list: &str, key: &str| -> Vec<String> {
            let items = list_items(&container.container, list).iter();
            items
                .map(|item| item[key].as_str().unwrap_or_default().to_owned())
                .collect()
        };
        let (mounts, devices) = (
            names("volumeMounts", "mountPath"),
            names("volumeDevices", "devicePath"),
        );
        let own = strings(mounts.iter().chain(&devices).map(String::as_str));
        if shares_mounts(container) {
            program.operation(copy_new(
                "variables.mounts",
                &own,
                &format!("/injected/{id}/volumeMounts/-"),
            ));
        }
        if shares_devices(container) {
            let devices = match shares_mounts(container) {
                true => "variables.devices.filter(d, !variables.mounts.exists(m, m.key == d.key))",
                false => "variables.devices",
            };
            program.operation(copy_new(
                devices,
                &own,
                &format!("/injected/{id}/volumeDevices/-"),
            ));
        }
        if let Some(policy) = &container.resources_policy {
            let targets = self.targets(peers, program);
            let field = format!("{}.resourcesPolicy", self.field);
            resources::add_resources(policy, id, &targets, &field, program)?;
        }
        self.share_env(patches, peers, program);
        let path = string(&format!("/injected/{id}/env/-"));
        for (variable, field_path) in &self.copy.versions {
            let value = json!({ "name": variable, "valueFrom": { "fieldRef": { "fieldPath": field_path } } });
            program.operation(format!(
                "[{}]",
                program::add(&path, &literal::value(&value, self.field)?)
            ));
        }
        Ok(())
    }

    fn share_env(&self, patches: &Patches<'_>, peers: &Peers<'_>, program: &mut Program) {
        let Self { container, id, .. } = self;
        let own = list_items(&container.container, "env").iter();
        let own: BTreeSet<&str> = own
            .map(|variable| variable["name"].as_str().unwrap_or_default())
            .chain([keys::ENV_IS_INJECTED])
            .collect();
        let mut parts = Vec::new();
        for transfer in &container.transfer_env {
            let from = transfer.source_container_name_from.as_ref();
            let from = from.and_then(|from| from.field_ref.as_ref());
            let source = match from.map(|field| EnvOrigin::from_field_path(&field.field_path)) {
                None => string(&transfer.source_container_name),
                Some(Some(EnvOrigin::Label(key))) => format!("{LABELS}[?{}].orValue('')", string(&key)),
                Some(Some(EnvOrigin::Annotation(key))) => value_of(&key, patches, peers, program),
                Some(None) => continue,
            };
            let one = Some(&transfer.env_name).filter(|name| !name.is_empty());
            let names: BTreeSet<&String> = one.into_iter().chain(&transfer.env_names).collect();
            let new = names
                .into_iter()
                .map(String::as_str)
                .filter(|name| !own.contains(name));
            let new = strings(new);
            let env = program.env_of(source);
            parts.push(format!("{new}.map(n, {env}.filter(e, e.key == n)).flatten()"));
        }
        if shares_mounts(container) {
            let own = strings(own);
            parts.push(format!("variables.mountEnv.filter(e, !(e.key in {own}))"));
        }
        if parts.is_empty() {
            return;
        }
        add_firsts(&format!("{id}Env"), &parts.join(" + "), program);
        program.operation(copy_new(
            &format!("variables.{id}Env"),
            "[]",
            &format!("/injected/{id}/env/-"),
        ));
    }

    /// The containers, and init containers that keep running, whose names no set uses that applies to the Pod.
    fn targets(&self, peers: &Peers<'_>, program: &mut Program) -> String {
        if program.variables.iter().any(|(name, _)| name == "targets") {
            return "variables.targets".to_owned();
        }
        let mut used = vec![format!("(n in {})", used_names(self.set))];
        for (at, _, variant) in peers.all() {
            let applies = annotations::applies(at, variant.condition.as_ref(), peers, program);
            used.push(format!("({applies} && n in {})", used_names(&variant.selected)));
        }
        let used = used.join(" || ");
        let of = |id: &str, condition: &str| {
            format!(
                "variables.{id}Own.filter(i, {condition}![variables.{id}Names[i]].exists(n, {used})).map(i, variables.{id}[i])"
            )
        };
        let native = of(
            "init",
            "variables.init[i].?restartPolicy.orValue('') == 'Always' && ",
        );
        program.variable("mainTargets", of("main", ""));
        program.variable("initTargets", native);
        program.variable(
            "targets",
            "variables.mainTargets.map(c, dyn(c)) + variables.initTargets.map(c, dyn(c))",
        )
    }
}

fn used_names(set: &Selected<'_>) -> String {
    let lists = [&set.spec.init_containers, &set.spec.containers];
    strings(lists.into_iter().flatten().flatten().map(name))
}

/// Operations that copy those of `all` to `path` that the container itself does not have.
fn copy_new(all: &str, own: &str, path: &str) -> String {
    let path = string(path);
    format!("{all}.filter(m, !(m.key in {own})).map(m, JSONPatch{{op: 'copy', from: m.from, path: {path}}})")
}

/// Adds the volumes that the containers use, if the Pod has none of the name.
fn add_volumes(set: &Selected<'_>, program: &mut Program) -> Result<(), Unsupported> {
    let text = |value: &Value| value["name"].as_str().unwrap_or_default().to_owned();
    let volumes = set.spec.volumes.iter().flatten().enumerate();
    let volumes: BTreeMap<String, (usize, &Value)> =
        volumes.map(|(at, volume)| (text(volume), (at, volume))).collect();
    let containers = [&set.spec.init_containers, &set.spec.containers];
    let containers = containers.into_iter().flatten().flatten();
    let used = containers.flat_map(|container| {
        let lists = ["volumeMounts", "volumeDevices"];
        lists
            .into_iter()
            .flat_map(|list| list_items(&container.container, list))
            .map(text)
    });
    let mut seen = BTreeSet::new();
    let used = used.filter(|name| volumes.contains_key(name) && seen.insert(name.clone()));
    let used: Vec<String> = used.collect();
    if used.is_empty() {
        return Ok(());
    }
    program.variable(
        "volumeNames",
        "object.spec.?volumes.orValue([]).map(v, string(v.name))",
    );
    program.operation(
        "has(object.spec.volumes) ? [] : [JSONPatch{op: 'add', path: '/spec/volumes', value: []}]",
    );
    for name in used {
        let Some((at, volume)) = volumes.get(&name) else {
            continue;
        };
        let field = format!("spec.volumes[{at}]");
        let volume = typed::checked::<Volume>((*volume).clone(), &field)?;
        let volume = program.variable(format!("volume{at}"), literal::value(&volume, &field)?);
        let add = program::add("'/spec/volumes/-'", &volume);
        program.operation(format!(
            "{} in variables.volumeNames ? [] : [{add}]",
            string(&name)
        ));
    }
    Ok(())
}

/// Adds the pull secrets that the Pod has not.
fn add_pull_secrets(set: &Selected<'_>, program: &mut Program) -> Result<(), Unsupported> {
    let secrets = set.spec.image_pull_secrets.as_deref().unwrap_or_default();
    if secrets.is_empty() {
        return Ok(());
    }
    program.variable(
        "pullSecretNames",
        "object.spec.?imagePullSecrets.orValue([]).map(s, string(s.?name.orValue('')))",
    );
    program.operation(
        "has(object.spec.imagePullSecrets) ? [] : [JSONPatch{op: 'add', path: '/spec/imagePullSecrets', value: []}]",
    );
    let mut seen = BTreeSet::new();
    for (at, secret) in secrets.iter().enumerate() {
        let field = format!("spec.imagePullSecrets[{at}]");
        let secret = typed::checked::<LocalObjectReference>(secret.clone(), &field)?;
        let name = secret["name"].as_str().unwrap_or_default();
        if seen.insert(name.to_owned()) {
            let add = program::add("'/spec/imagePullSecrets/-'", &literal::value(&secret, &field)?);
            program.operation(format!(
                "{} in variables.pullSecretNames ? [] : [{add}]",
                string(name)
            ));
        }
    }
    Ok(())
}
