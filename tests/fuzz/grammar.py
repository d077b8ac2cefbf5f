"""Templates of expressions and statements, from which programs are made.

In a template `{f}` stands for a float tensor, `{g}` for another or a number, `{i}` for a tensor of ints, `{b}` of
bools,
`{z}` for a complex one, `{t}` for any tensor, `{p}` for a Python number, `{n}` for a small int, `{d}` for a dim,
`{x}` for an
index, and `~` for a space.
"""


def _words(text: str) -> list[str]:
    return text.split()


UNARY = _words("""
{f}.sin() {f}.cos() {f}.tanh() {f}.exp() {f}.abs() -{f} {f}.square() {f}.abs().sqrt() {f}.sigmoid() {f}.relu()
F.silu({f}) F.gelu({f}) F.softplus({f}) F.elu({f}) F.leaky_relu({f},{p}) {f}.abs().log1p() ({f}.square()+1).log()
{f}.reciprocal() {f}.clamp(-1,1) {f}.clamp(min={p}) {f}.clamp_max({p}) {f}.sign() {f}.floor() {f}.ceil() {f}.round()
{f}.trunc() {f}.frac() {f}.erf() {f}.atan() {f}.expm1() {f}.rsqrt() {f}.sinh() {f}.asinh() F.mish({f}) F.hardtanh({f})
F.relu6({f}) F.hardswish({f}) F.logsigmoid({f}) F.softsign({f}) F.tanhshrink({f}) F.celu({f}) F.selu({f})
{f}.nan_to_num() {f}.detach() {f}.clone() {f}.contiguous() {f}.data {f}.positive() torch.square({f})
torch.deg2rad({f}) torch.sinc({f}) torch.logit({f}.sigmoid()) {f}.neg() {f}.sgn() {f}.exp2() {f}.log2() {f}.special_i0
torch.special.i0({f}) torch.special.erfcx({f}) torch.lgamma({f}.abs()+1) torch.digamma({f}.abs()+1)
""")

BINARY = _words("""
{f}+{g} {f}-{g} {f}*{g} {f}/{g} {p}-{f} {p}*{f} {p}/{f} {f}**2 {f}**3 {f}**{p} {p}**{f} {f}.abs()**{g} {f}//{g}
{f}%{g} {p}%{f} {p}//{f} 0.0-{f} 1/{f} 0**{f}.abs() torch.maximum({f},{f}) torch.minimum({f},{f}) torch.fmax({f},{f})
torch.atan2({f},{f}) torch.fmod({f},{g}) torch.remainder({f},{g}) torch.copysign({f},{g}) torch.hypot({f},{f})
torch.where({b},{f},{g}) torch.where({f}>0,{f},{f}) torch.where({b},{p},{f}) torch.where({b},{p},{p})
torch.lerp({f},{f},{p}) torch.lerp({f},{f},{f}) torch.addcmul({f},{f},{f},value={p})
torch.addcdiv({f},{f},{f}.square()+1,value={p}) torch.add({f},{g},alpha={n}) torch.sub({f},{f},alpha={p})
torch.rsub({f},{f},alpha={p}) torch.xlogy({f},{f}.abs()+1) torch.logaddexp({f},{f}) torch.mul({f},{g})
torch.div({f},{g},rounding_mode="floor") torch.div({f},{f},rounding_mode="trunc") torch.true_divide({f},{g})
torch.pow({f}.abs()+1,{f}) torch.pow({p},{f}) torch.heaviside({f},{f}) torch.nextafter({f},{f}) torch.ldexp({f},{i})
torch.dist({f},{f}) F.mse_loss({f},{f}) F.l1_loss({f},{f}) F.smooth_l1_loss({f},{f}) F.huber_loss({f},{f},delta={p})
F.binary_cross_entropy_with_logits({f},{f}.sigmoid()) F.cosine_similarity({f},{f},dim={d})
F.pairwise_distance({f},{f}) F.kl_div({f}.log_softmax(-1),{f}.softmax(-1),reduction="sum") torch.cdist({f},{f})
{f}*{t} {f}+{t} {t}*{p} {t}+{p} {t}-{t} {f}-{f}.mean() {f}*{f}.sum() {f}/{f}.norm() {f}/({f}.square().sum()+1)
{f}*{f}.shape[0] {f}.float() {f}.double() {f}.to(torch.float32) {f}.type_as({f})
""")

REDUCTIONS = _words("""
{f}.sum() {f}.mean() {f}.sum({d}) {f}.sum({d},keepdim=True) {f}.mean({d}) {f}.mean({d},True) {f}.amax({d})
{f}.amin({d},keepdim=True) {f}.prod() {f}.prod({d}) {f}.var() {f}.var({d},unbiased=False) {f}.std({d})
{f}.std(correction=0) {f}.norm() {f}.norm(dim={d}) {f}.norm(1) {f}.norm(float("inf"),dim={d})
torch.linalg.vector_norm({f},3) {f}.logsumexp({d}) {f}.cumsum({d}) {f}.cumprod({d}) {f}.max() {f}.min()
{f}.max({d})[0] {f}.max({d}).values {f}.min({d}).indices {f}.median() {f}.median({d})[0] {f}.sort({d})[0]
{f}.sort(dim={d},descending=True)[1] {f}.argsort({d}) {f}.topk(1,{d})[0] {f}.kthvalue(1,{d})[0] {f}.argmax()
{f}.argmax({d}) {f}.argmin({d},keepdim=True) {f}.softmax({d}) {f}.log_softmax({d}) F.softmin({f},{d})
{f}.cummax({d})[0] {f}.logcumsumexp({d}) {f}.diff(dim={d}) torch.count_nonzero({f}) torch.trapezoid({f})
F.normalize({f},dim={d}) F.layer_norm({f},{f}.shape[-1:]) F.rms_norm({f},{f}.shape[-1:]) {f}.nansum() {f}.nanmean({d})
{f}.aminmax()[1] torch.var_mean({f},{d})[0] torch.std_mean({f})[1] {f}.renorm(2,0,1.0) {f}.quantile(0.5)
{f}.sum(dtype=torch.float32) {f}.trace() {f}.det() torch.linalg.norm({f}) {f}.mode({d})[0] {f}.unsqueeze(0).sum((0,1))
{f}.sum((0,-1)) {f}.mean((-1,-2)) {f}.norm(p=2,dim=(0,1))
""")

SHAPES = _words("""
{t}.reshape(-1) {t}.view(-1) {t}.flatten() {t}.t() {t}.T {t}.mT {t}.transpose(0,-1) {t}.transpose({d},{d})
{t}.permute(1,0) {t}.unsqueeze({d}) {t}.squeeze() {t}.squeeze({d}) {t}.expand(2,*{t}.shape) {t}.expand(3,-1,-1)
{t}.expand_as({t}) {t}.repeat(2,1) {t}.tile(2) {t}.flip({d}) {t}.roll({n},{d}) {t}.roll(1) torch.cat([{t},{t}])
torch.cat([{f},{f}],{d}) torch.stack([{f},{f}]) torch.stack([{f},{f}],{d}) {t}.chunk(2)[0] {t}.chunk(2,{d})[-1]
{t}.split(2,{d})[0] {t}.split([1,2])[1] {t}.select({d},0) {t}.narrow({d},1,1) {t}.narrow({d},0,{n}) {t}[0] {t}[-1]
{t}[1:] {t}[:-1] {t}[::2] {t}[:,0] {t}[...,1:] {t}[None] {t}[...,None] {t}[{x}] {t}[{x}] {t}[:,None] {t}[{i}] {t}[{b}]
{f}[{f}>0] {t}[[0,-1]] {t}[...,0] {t}[0:0] {t}.gather({d},{i}) {t}.index_select({d},{i})
torch.take_along_dim({t},{i},{d}) {t}.take({i}) {t}.diagonal() torch.diag({t}) torch.diag_embed({t}) {t}.tril()
{t}.triu(1) {t}.unfold({d},2,1) {t}.movedim(0,-1) {t}.as_strided((2,2),(1,1)) {t}.as_strided((2,),(2,),1)
F.pad({f},(1,0)) F.pad({f},(1,1),value={p}) F.pad({f},(-1,1)) {t}.rot90() torch.meshgrid({t},{t},indexing="ij")[0]
{t}.unbind({d})[0] {t}.unbind()[-1] {t}.reshape(1,-1) {t}.reshape(-1,1) {t}.view({t}.shape) {t}.swapaxes(0,1)
{t}.ravel() torch.atleast_2d({t}) torch.hstack([{t},{t}]) torch.vstack([{t},{t}]) torch.block_diag({f},{f})
torch.broadcast_to({t},(2,3,3)) torch.broadcast_tensors({t},{t})[1] {t}.repeat_interleave(2)
{t}.repeat_interleave(2,{d}) torch.tensor_split({t},2)[0] {t}.masked_fill({b},{p}) {f}.masked_fill({f}>0,{p})
torch.masked_select({t},{b}) {t}.index_fill({d},{i},{p}) {f}.scatter({d},{i},{p}) {f}.scatter({d},{i},{f})
{f}.scatter_add({d},{i},{f}) {f}.index_add({d},{i},{f}) {f}.index_copy(0,{i},{f}) {f}.index_put(({i},),{f})
{f}.index_put(({i},),{f},accumulate=True) {f}.masked_scatter({b},{f}) torch.select_scatter({f},{f},{d},0)
torch.slice_scatter({f},{f},{d},0,1) torch.diagonal_scatter({f},{f}) F.one_hot({i},4) {t}.nonzero() {t}.unique()
{t}.contiguous() {f}.to_dense() {t}.view_as({t}) {t}.new_zeros(2) {f}.new_ones({f}.shape) {f}.new_full((2,),{p})
torch.zeros_like({t}) torch.ones_like({f}) torch.full_like({f},{p}) torch.empty_like({f}).fill_({p})
torch.zeros(3,dtype={f}.dtype) torch.arange({f}.shape[0]) torch.arange({f}.numel()).reshape({f}.shape)
torch.linspace(0,1,{f}.numel(),dtype=torch.float64) torch.eye({f}.shape[0],dtype={f}.dtype) torch.tensor({p})
torch.tensor([{p},{p}]) torch.tensor([{f}.shape[0],{n}]) torch.as_tensor({p},dtype={f}.dtype) {t}.real
{t}.to(torch.int64) {t}.bool() {t}.long() {f}.int() {t}.squeeze(0).unsqueeze(0) {t}.unflatten(0,(-1,1))
{t}.reshape({t}.shape[::-1]) {t}.adjoint() {t}.mH {t}.narrow_copy({d},0,1) {t}.select({d},-1) torch.squeeze({t},{d})
""")

PRODUCTS = _words("""
{f}@{f} {f}@{f}.t() {f}.mm({f}) {f}.mv({f}) torch.dot({f},{f}) torch.outer({f},{f}) torch.matmul({f},{f})
F.linear({f},{f}) F.linear({f},{f},{f}) torch.einsum("ij,jk->ik",{f},{f}) torch.einsum("i,ij->j",{f},{f})
torch.einsum("ij->ji",{f}) torch.einsum("ii->i",{f}) torch.einsum("...i,...i->...",{f},{f})
torch.baddbmm({f},{f}[None],{f}[None]) torch.addmm({f},{f},{f},beta={p}) torch.addmv({f},{f},{f})
torch.bmm({f}[None],{f}[None]) torch.tensordot({f},{f},1) torch.kron({f},{f}) torch.chain_matmul({f},{f})
F.conv1d({f}[None],{f}[:,:,None]) F.conv1d({f}[None],{f}[:,None,:2],groups={f}.shape[0],padding=1)
F.avg_pool1d({f}[None],2) F.max_pool1d({f}[None],2) torch.inner({f},{f})
torch.linalg.solve({f}@{f}.T+3*torch.eye({f}.shape[0],dtype={f}.dtype),{f})
torch.linalg.inv({f}@{f}.T+torch.eye({f}.shape[0],dtype={f}.dtype))
F.scaled_dot_product_attention({f}[None],{f}[None],{f}[None]) F.cross_entropy({f},{i})
F.nll_loss({f}.log_softmax(-1),{i}) F.embedding({i},{f}) F.embedding_bag({i}[None],{f})
F.interpolate({f}[None],scale_factor=2) torch.linalg.qr({f})[1].abs() torch.linalg.svdvals({f})
torch.logdet({f}@{f}.T+torch.eye({f}.shape[0],dtype={f}.dtype)) torch.cumulative_trapezoid({f})
torch.cross({f},{f},dim={d}) torch.linalg.cholesky({f}@{f}.T+torch.eye({f}.shape[0],dtype={f}.dtype))
torch.fft.rfft({f}).abs() torch.fft.ifft({f}).real F.batch_norm({f},None,None,training=True) F.group_norm({f}[None],1)
torch.linalg.slogdet({f}@{f}.mT+torch.eye({f}.shape[-1],dtype={f}.dtype))[1] torch.linalg.matrix_exp({f}) {f}.matrix_power(3)
torch.linalg.eigvalsh({f}@{f}.mT) torch.linalg.pinv({f}) torch.linalg.multi_dot([{f},{f},{f}]) torch.linalg.matrix_norm({f})
torch.linalg.lstsq({f},{f}).solution torch.linalg.solve_triangular({f}+3*torch.eye({f}.shape[-1]),{f},upper=True)
torch.cholesky_solve({f},torch.eye({f}.shape[-2],dtype={f}.dtype)*2) torch.linalg.svd({f})[1] torch.linalg.vecdot({f},{f})
torch.linalg.det({f}) torch.linalg.inv_ex({f}@{f}.mT+torch.eye({f}.shape[-1],dtype={f}.dtype))[0] torch.linalg.cond({f})
torch.linalg.lu({f})[2] torch.linalg.vander({f}) torch.linalg.tensorinv({f}[None,None]) torch.cov({f}) torch.corrcoef({f})
F.instance_norm({f}[None]) F.glu({f},{d}) F.bilinear({f},{f},{f}[None])
""")

NOT_FLOAT = _words("""
{f}>{g} {f}<={p} {f}=={f} {f}.isnan() {f}.isfinite() {b}&{b} {b}|{b} ~{b} {b}^{b} {b}.any() {b}.all({d}) {b}.sum()
{b}.to({f}.dtype) {f}.gt({g}) torch.logical_and({f},{b}) {f}.ge(0) {i}+{i} {i}*{n} {i}//2 {i}%3 -{i} {i}.float()
{i}.double() {i}/2 {i}>>1 {i}.clamp(0,2) {i}.max() {i}.sum() {i}.cumsum(0) {i}.argsort() {i}**2 {i}*{p} {i}+{f}
{i}.bitwise_and({n}) {i}<{n} {i}.sort().values {i}.flip(0) {i}.bool() {b}.float() {b}*{f} {b}+{b} {b}.int() {i}.prod()
{i}.unique() torch.bincount({i}.flatten()) {f}.sign().long() {i}-1 3-{i} {i}.remainder({n}) {i}.float().mean()
torch.complex({f},{f}) torch.polar({f}.abs(),{f}) {z}.conj() {z}.real {z}.imag {z}.conj().imag {z}.abs() {z}*{z}
{z}*{z}.conj() {z}+{p} {z}.exp() {z}.sum() {z}.angle() {z}.mT.conj() {z}.mH torch.view_as_real({z}) {z}@{z}
{z}.resolve_conj() torch.fft.fft({f}) torch.fft.fft({z}) {z}.conj().real {f}*1j {z}/2 -{z} {z}.sin() {z}.reshape(-1)
{i}+torch.tensor(1.5) {f}.float()*torch.tensor(2.0,dtype=torch.float64) {f}.float().sum()*{i} {i}.sum()*{f}.float()
torch.where({b},{f}.float(),torch.tensor(2.5,dtype=torch.float64)) torch.where({b},{i},torch.tensor(1.5))
torch.where({b},{i},{p}) torch.where({b},torch.tensor(1),{f}.float()) torch.where({b},{f}.float(),{f}.sum())
{f}.float()*{f}.sum() {f}.float()+{f}[0].sum() {i}*{f}.sum() {b}*{p} {b}+{i}.sum() {i}/{i}.sum() {i}**{p} {b}/2
{i}.sum()**{f}.float() {f}.float().clamp(min={f}.sum()) torch.add({i},{i},alpha={n}) {i}.sum()+{p} {f}.float().sum()*{p}
torch.cat([{f}.float(),{f}]) torch.stack([{i},{f}]) torch.maximum({f}.float(),{f}.sum()) {i}.float().lerp({f}.float(),0.5)
{f}.float().pow({f}.sum()) torch.result_type({f}.float(),{f}.sum())==torch.float32 {f}.to({i}.dtype)*{p}
{z}.conj_physical() {z}*{f} torch._neg_view({f}) torch._neg_view({f})*2 {z}.conj()[0] {z}.t()
{z}.transpose(0,-1).conj() {z}.square() {z}.conj().clone() {z}.sgn() torch.linalg.vecdot({z},{z}) {z}.is_conj()
torch.isreal({z}) {z}.mean()
""")

RANDOM = _words("""
torch.rand_like({f}) torch.randn_like({f}) torch.randn({f}.shape,dtype={f}.dtype) torch.rand(3,dtype=torch.float64)
F.dropout({f},0.5) F.dropout({f},0.5,training=False) torch.bernoulli({f}.sigmoid()) torch.randint(0,3,({n},))
torch.randperm(3) torch.multinomial({f}.softmax(-1),2) torch.normal({f},0.5)
torch.normal(0.0,1.0,(3,),dtype=torch.float64) torch.empty_like({f}).uniform_() torch.empty_like({f}).normal_()
torch.zeros_like({f}).exponential_() F.gumbel_softmax({f}) F.alpha_dropout({f},0.3,True) F.rrelu({f},training=True)
torch.randint_like({f},5) torch.rand({f}.shape[0],dtype=torch.float64) torch.bernoulli({f},0.5)
torch.poisson({f}.abs()) F.feature_dropout({f},0.5) torch.nn.init.normal_(torch.empty_like({f}))
""")

SIZED = _words("""
{f}**{f}.shape[0] {f}.sum({f}.dim()-1) {f}.roll({f}.shape[0]-1,0) {f}.norm(p={f}.dim()) {f}.reshape({f}.shape[0],-1)
{f}[:{f}.shape[0]//2+1] torch.full_like({f},{f}.shape[-1]/2) F.pad({f},({f}.dim(),0)) {f}.new_ones({f}.shape[0])
{f}.unflatten(0,(-1,{f}.shape[0])) {f}.split({f}.shape[0]//2+1)[0] {f}.view({f}.numel(),1) {f}.cumsum(-{f}.dim())
{f}.expand({f}.shape[0],*{f}.shape) {f}.narrow(0,0,{f}.shape[0]-1) {f}.repeat({f}.dim(),*[1]*{f}.dim())
torch.arange({f}.shape[0])*{f}.dim() {f}.mul({f}.numel()).div({f}.shape[0]) {f}.diagonal({f}.dim()-2)
""")
"""Sizes as exponents, dims, steps, shapes and numbers."""

SUMS = _words("""
torch.einsum("i...,i...->...",{f},{f}) torch.einsum("i...->...",{f}) torch.einsum("...i,...i->...i",{f},{f})
torch.einsum("ij,jk->ki",{f},{f}) torch.einsum("ii->i",{f}) torch.einsum({f},[0,...],{f},[1,...],[0,1,...])
torch.tensordot({f},{f},dims=1) torch.where({f}>0,{f},{g}) {f}.index_put(({i},),{f}) {f}.index_put(torch.where({f}>0),{f}.sum())
torch.rand(3,generator=torch.Generator().manual_seed(2),dtype=torch.float64) torch.masked_fill({f},{f}>0,{p})
{f}.masked_scatter({f}>0,{f}) torch.stack(torch.where({f}>0)) {f}.take_along_dim({f}.argsort(-1),-1)
{f}.gather({d},{f}.argsort({d})) torch.logsumexp({f},{d}) torch.func.vmap(torch.sin)({f}) {f}.half().double()
""")

NUMBERS = _words("""
{f}.shape[0] {f}.dim() {f}.numel() len({f}) {f}.size(-1)*2 {f}.shape[-1]/2 {f}.ndim+1 int({f}.shape[0]>2) {p}*2 {p}+1
{f}.stride(-1) {f}.storage_offset() {f}.element_size() {f}.is_contiguous() {f}.requires_grad {f}.is_leaf
torch.is_grad_enabled() {t}.dtype==torch.float64 {t}.is_floating_point() float({f}.shape[0])**0.5 1/{f}.shape[-1]
{f}.shape[0]//2 -{f}.shape[0]%3 max({f}.shape[0],2) sum({f}.shape) {f}.shape==({f}.shape) tuple({f}.shape)
{f}.nelement()-1 {t}.is_complex() {f}.is_conj() {f}.nbytes {t}._is_view() torch.is_tensor({f})
isinstance({f},nn.Parameter)
""")

WRITES = _words("""
{f}+={g} {f}-={f} {f}*={g} {f}/={g} {f}.add_({g}) {f}.add_({f},alpha={p}) {f}.mul_({g}) {f}.sub_({g}) {f}.div_({g})
{f}.copy_({g}) {f}.copy_({t}) {f}.zero_() {f}.fill_({p}) {f}.neg_() {f}.sin_() {f}.exp_() {f}.abs_() {f}.relu_()
F.relu_({f}) {f}.clamp_(-1,1) {f}.sigmoid_() {f}.tanh_() {f}.square_() {f}.pow_(2) {f}.t().mul_({p}) {f}[0]={g}
{f}[-1]+={g} {f}[1:]={g} {f}[:,0]={p} {f}[::2]*={p} {f}[{x}]={g} {f}[{x}]+={p} {f}[{x}]=0 {f}[0].add_({g})
{f}[...,0].zero_() {f}[{b}]={p} {f}[{f}>0]={p} {f}[{f}>0]*={p} {f}[{i}]={p} {f}[{i}]+={g} {f}.view(-1)[0]={p}
{f}.reshape(-1)[1:].mul_({p}) {f}.transpose(0,-1)[0]={g} {f}.diagonal().fill_({p}) {f}.diagonal().add_({f})
{f}.masked_fill_({b},{p}) {f}.index_add_(0,{i},{f}) {f}.index_copy_(0,{i},{f}) {f}.index_fill_({d},{i},{p})
{f}.scatter_({d},{i},{p}) {f}.scatter_add_({d},{i},{f}) {f}.index_put_(({i},),{f},accumulate=True)
{f}.scatter_reduce_({d},{i},{f},"amax") {f}.addcmul_({f},{f}) {f}.lerp_({f},{p}) {f}.addmm_({f},{f}) {f}.cumsum_({d})
{f}.tril_() {f}.t_() {f}.unsqueeze_(0) {f}.squeeze_() {f}.transpose_(0,-1) {f}.swapaxes_(0,-1) {f}.detach().add_({p})
{f}.fill_diagonal_({p}) {f}.expand(2,*{f}.shape)[0].mul_(2) {f}.unbind()[0].mul_({p}) {f}.chunk(2)[0].add_({p})
{f}.split(1)[-1].zero_() {f}.narrow(0,0,1).copy_({f}) {f}.select(-1,0).neg_() {f}.unsqueeze(0)[0,0]=2
{f}.squeeze().mul_({p}) {f}.as_strided((2,),(1,)).add_({p}) {f}.movedim(0,-1).sub_({g}) torch.add({f},{g},out={f})
torch.mul({f},{f},out={f}) torch.sin({f},out={f}) torch.cat([{f},{f}],out={f}) torch.sum({f},0,out={f})
torch.mm({f},{f},out={f}) torch.maximum({f},{f},out={f}) torch.matmul({f},{f},out={f})
torch.add({f},{g},out={f}[0]) torch.mul({f},{g},out={f}.t()) torch.exp({f},out={f}[::2])
torch.sub({f},{g},out={f}.view(-1))
torch.cumsum({f},0,out={f}) torch.div({f},{p},out={f}.narrow(0,0,1)) torch.neg({f},out={f}.unsqueeze(0))
{f}[{x}].copy_({f}) {f}.t().copy_({f}) {f}.view({f}.shape).add_({g}) {f}.data.add_({p}) {f}.detach()[0].mul_({p})
{f}.view(-1)[::2].neg_() {f}.expand_as({f}).mul_({p}) {f}.swapaxes(0,-1).add_({f}) {f}.unflatten(0,(1,-1))[0].mul_({p})
torch.where({b},{f},{f},out={f}) torch.clamp({f},-1,1,out={f}) torch.stack([{f},{f}],out={f}) {f}.uniform_()
{f}.normal_() {f}.bernoulli_(0.5) {f}.exponential_() {f}.random_(0,3) {f}.cauchy_() {f}.log_normal_()
{f}.geometric_(0.5) F.dropout({f},0.5,inplace=True) nn.init.uniform_({f}) {i}.add_(1) {i}[0]=1 {i}*={n}
{i}.clamp_(0,1) {i}.zero_() {i}+={i} {b}.logical_not_() {b}[0]=True {b}&={b} {b}|={b} {b}.fill_(False) {z}.mul_({p})
{z}.conj().mul_({z}) {z}.real.mul_({p}) {z}.imag.zero_() {z}.imag.add_({f}) {z}.conj_physical_()
{z}.conj().imag.add_(1) {z}.real.copy_({f}) torch.view_as_real({z}).mul_({p}) {z}[0]={p} {z}.copy_({z}.conj())
torch._neg_view({f}).add_({p}) {f}.copy_({z}.imag) {z}.neg_() {f}.register_hook(lambda~g:~g*2)
{f}.register_hook(lambda~g:~None) {f}.register_hook(lambda~g:~g.clamp(-1,1)) {f}.nan_to_num_() {f}.clamp_min_({p})
{f}.floor_() {f}.renorm_(2,0,1.0) {f}.where({b},{f}).mul_(2) {f}.erfinv_() {f}.sub_({f},alpha=2) {f}.atan2_({f})
{f}.fmod_({p}) {f}.remainder_({p}) {f}.floor_divide_({p}) {f}.sign_() {f}.round_()
{f}.addcdiv_({f},{f}.square()+1,value={p}) {f}.masked_scatter_({b},{f}) {f}.put_({i},{f}) {f}.sort()[0].mul_(2)
{f}.hardtanh_() torch.sum({t},0,out={t}) torch.cumsum({t},{d},out={t}) torch.add({t},{t},out={t})
{t}.mul_({t}) {t}.add_({t},alpha={p}) {f}.add_({i}) {f}.mul_({b}) {f}.copy_({i}) {f}.copy_({b}) {i}.copy_({f}) {b}.copy_({f})
{f}.eq_({g}) {f}.gt_({p}) {f}.logical_and_({f}) {b}.logical_and_({f}) {b}.bitwise_xor_({b}) {i}.mul_({b}) {i}.add_({b})
{f}.float().add_({f}) {f}.pow_({i}) {f}.div_({i}) {i}.floor_divide_({n}) {i}.pow_(2) {i}.remainder_({n}) {f}.addcmul_({f},{i})
{f}[{i}]={i} {f}[{b}]={i}[0] {f}[0]={i}.sum() {f}.masked_fill_({b},{f}.sum()) {f}.clamp_({f}.min(),{p}) {f}.copysign_({f})
{f}.index_put_(({i},),{f}[0],accumulate=True) {f}.index_put_(({i},{i}),{f}.sum(),accumulate=True) {f}[{b}]={f}.sum()
{f}[{b}]+={p} {f}.detach_() {f}.squeeze_(-1)
torch.mean({f},{d},out={t}) torch.sigmoid_({f}) F.elu_({f}) F.leaky_relu_({f})
""")

SHARED = _words("""
{f}[torch.tensor(1)] {f}[:,torch.tensor(0)] {f}[torch.tensor(-1),None] {f}[torch.tensor(1),1:] {f}.view(torch.int64)
{f}.view(torch.float32) {z}.view(torch.float64) torch.view_as_complex({f}[...,:2]) {f}.view(torch.complex128)
{i}.view(torch.float64) {f}.detach() {f}.detach()[0] {f}.data {f}.data[0] {f}.to({f}.dtype) {f}.double()
{f}.contiguous()
{f}.type(torch.float64) {f}.reshape({f}.shape) {f}.expand({f}.shape) torch.atleast_1d({f})
torch.broadcast_to({f},{f}.shape)
torch.as_tensor({f}) torch.asarray({f}) {f}.cpu() {z}.resolve_conj() {f}.resolve_neg() {f}.positive() +{f}
torch.real({f}) F.dropout({f},0.0) nn.Identity()({f}) torch.narrow({f},0,torch.tensor(0),1) torch.ops.aten.alias({f})
{f}.T.T {f}.unsafe_chunk(2)[0] torch.hsplit({f},3)[0] torch.linalg.diagonal({f}) torch.diagonal({f},0,0,1)
{f}.clone().requires_grad_() {f}.detach().clone().requires_grad_() nn.Parameter({f}.detach()) torch.stack(tuple({f}))
list({f})[0] [*{f}][-1] {f}.unflatten(0,(1,-1)) torch.movedim({f},0,-1) {f}.expand(2,*{f}.shape)[0] {f}.narrow({d},0,1)
{f}.squeeze({d}) {f}.flatten() {f}.reshape(-1) {f}.ravel() {f}.mT {f}.unbind()[-1] torch.split({f},1)[0] {z}.real
{z}.imag
{z}.conj() {z}.mH torch.view_as_real({z}) {z}.conj().imag torch._neg_view({f}) {f}.unfold(0,2,1)
{f}.as_strided((2,),(1,))
max({f},{f},key=lambda~t:t.dim()) {f}.requires_grad_(True) {f}.swapdims(0,-1) {f}.view_as({f}) torch.squeeze({f})
{f}.to(torch.float64,copy=False) {f}.to(torch.float64,copy=True) {f}.to({f}) {f}.type_as({f}) torch.positive({f})
{f}.clone(memory_format=torch.contiguous_format) {f}.diagonal() {f}.masked_fill({b},0) {f}.new_tensor({p}) {f}[None][0]
torch.concat([{f}]) torch.cat([{f}]) torch.where(torch.tensor(True),{f},{f}) {f}.repeat(1) {f}.sum(()) {f}[...] {f}[:]
torch.clamp({f}) if~0~else~{f} {f}.mul(1) {f}.gather(0,torch.zeros_like({f},dtype=torch.long)) {f}.index_select(0,{i})
""")
"""Results that are, share memory with, or are copies of what they are taken of, depending on details."""

WRITES_BY_VIEW = _words("""
{f}[torch.tensor(1)].mul_({p}) {f}[torch.tensor(0)].add_({g}) {f}[{i}].mul_(2) {f}[:,torch.tensor(1)].zero_()
{f}[torch.tensor(1),None].add_(1) {f}[torch.tensor(1)]=0 {f}[torch.tensor(1)]+={g} {f}.view(torch.int64).add_(1)
{f}.view(torch.int64)[0].zero_() {f}[0].view(torch.int64).zero_() {f}.detach().view(torch.int64)[0]=0
{f}.view(torch.float32)[...,0]=0 {z}.view(torch.float64).mul_({p}) torch.view_as_complex({f}[...,:2]).mul_(1j)
{f}.index_put_((torch.tensor([0,0]),),{f},accumulate=True) {f}.index_put_(({b},),{f}[0]) {f}.index_put_(({i},),{f}[0])
{f}.expand(2,*{f}.shape).scatter_(0,{i},{p}) torch.where({b},{f},{f},out={f}[0]) torch.add({f},{f},out={z}.real)
torch.sin({f},out={f}.diagonal()) torch.add({f},1,out={f}.T) torch.mul({f},{f},out={f}[...,0])
torch.exp({f},out={z}.imag)
torch.sum({f},-1,out={f}[0]) torch.cat([{f},{f}],out={f}.view(-1)) torch.max({f},{d},out=({f},{i}))
torch.sort({f},out=({f},{i})) torch.mm({f},{f},out={f}.t()) {z}.real[0]={p} {z}.imag+={f} {z}.imag.copy_({f})
{z}.real.add_({f}) torch.view_as_real({z})[...,0].zero_() {z}.mH.mul_({p}) {z}.mT.conj()[0].add_(1j)
{z}.conj().copy_({z}) {z}.resolve_conj().mul_(2) {z}.T.imag.zero_() {z}.conj().real[0].fill_({p})
{f}.data[0]={p} {f}.data.t().mul_({p}) {f}.detach().t()[0].zero_() {f}.detach().view(-1)[0]={p} {f}.data.zero_()
{f}.unsqueeze_({d}) {f}.squeeze_({d}) {f}.transpose_({d},{d}) {f}.swapdims_(0,1) {f}.detach_() {f}.requires_grad_()
torch._foreach_add_([{f},{f}],{p}) torch._foreach_mul_([{f}],[{f}]) nn.init.zeros_({f}) {f}.to({f}.dtype).mul_({p})
{f}.double().add_(1) {f}.contiguous().mul_({p}) {f}.reshape(-1).add_({p}) {f}.expand({f}.shape).mul_({p})
torch.as_tensor({f}).add_({p}) {f}.positive().mul_(2) (+{f}).mul_(3) nn.Identity()({f}).add_(1) {f}.flatten()[0]={p}
{f}.ravel().mul_({p}) torch.atleast_2d({f}).neg_() {f}.squeeze().unsqueeze(0).mul_({p}) {f}.resolve_neg().add_(1)
torch._neg_view({f})[0].mul_({p}) torch._neg_view({f}).copy_({f}) {f}.unfold(0,2,2)[0].mul_({p}) list({f})[0].mul_({p})
{f}.chunk(2,{d})[-1].mul_({p}) {f}.tensor_split(2)[0].add_({g}) {f}.diagonal(0,-2,-1).zero_()
{f}.movedim(0,-1)[0].add_(1)
{f}.mT[0].mul_({p}) {f}.T.T.add_({p}) {f}.unbind(-1)[0].copy_({g}) {f}.split([1,2])[1].mul_({p})
{f}.view(-1).unfold(0,1,1).mul_(2)
{f}.masked_fill_({f}>0,{f}.sum()) {f}.fill_({f}.sum()) {f}[0].fill_({f}.mean()) {f}.copy_({f}.sum()) {f}.copy_({f}[0])
{f}.index_add_(0,{i},{f},alpha=2) {f}.index_reduce_(0,{i},{f},"prod") {f}.scatter_(0,{i},{f},reduce="add")
{f}.put_({i},{f},accumulate=True)
{f}.as_strided((2,),(1,),1).mul_({p}) {f}.select(0,torch.tensor(1)).mul_(2) {f}.narrow(0,torch.tensor(1),1).mul_({p})
{f}.lerp_({f},{f}) {f}.addmv_({f},{f}) {f}.addr_({f},{f}) {f}.baddbmm_({f},{f}) {f}.cumprod_({d}) {f}.triu_(1)
{f}.clip_(-1,1)
{f}.mul_({f}.detach()) {f}.add_({f}.data) {f}.sub_({f}[0]) {f}[0].sub_({f}[1])
{f}[0],{f}[1]={f}[1].clone(),{f}[0].clone() {f}[torch.where({f}>0)]={p} {f}[torch.where({f}>0)]*={p}
{f}.index_put_(torch.where({f}>0),{f}.sum()) {f}.copy_({f}.reshape({f}.shape).flip(0))
""")

RARE_WRITES = _words("""
{f}.requires_grad_() {f}.requires_grad_(False) {f}.set_({f}) {f}.resize_(2,2).zero_() {f}.set_({f}.clone()) {f}.data.mul_({p})
{f}.data.copy_({f}) {f}.data={f}.data*2 {f}.detach_() {f}.as_strided_((2,),(1,))
{f}.retain_grad() {f}.unfold(0,2,2).mul_({p}) {f}.bool().logical_not_() {f}.logical_not_() {f}.gt_({f})
""")

CONTAINERS = _words("""
d["a0"]={f} d["new"]={f} d["a0"].add_({g}) d.update(w={f}) d["a0"]=d["a0"]*2
""")

MODULE_CALLS = _words("""
torch.func.functional_call({m},dict({m}.named_parameters()),({f},))
torch.func.functional_call({m},{k:v*2~for~k,v~in~{m}.named_parameters()},({f},)) {m}({f}) {m}({f}[...,:3])
{m}({f}).sum() {m}({m}({f})) {m}({f}.detach())
torch.func.functional_call({m},{k:v.clone()~for~k,v~in~[*{m}.named_parameters(),*{m}.named_buffers()]},({f},))
(q:={k:v.clone()~for~k,v~in~{m}.named_buffers()},torch.func.functional_call({m},{**dict({m}.named_parameters()),**q},({f},)),sum(v.sum()~for~v~in~q.values()))[-1]
sum(v.sum()~for~v~in~T.grad(lambda~q:torch.func.functional_call({m},q,({f},)).sum())(dict({m}.named_parameters())).values())
T.vmap(lambda~u:torch.func.functional_call({m},{k:v.clone()~for~k,v~in~[*{m}.named_parameters(),*{m}.named_buffers()]},(u[None],)))({f})
T.vmap(lambda~k:torch.func.functional_call({m},{n:v*k~for~n,v~in~{m}.named_parameters()},({f},)))(torch.arange(1.0,3,dtype=torch.float64))
""")

INDICES = _words("""
0 -1 1 1: :-1 ::2 1::2 :,0 :,1: :,::2 ...,0 ...,1: None :,None 0,0 0,-1 [0,1] :,[1,0] [0,1],[1,0] 0:0 0:1 1,1: -2:
:2,:2 ...,None,: torch.tensor([0,1]) :,torch.tensor([1,1]) [[0,1],[1,0]] True [True,False,True] None,0 ..., 2: :,-1:
(slice(None),0) torch.tensor(1) 0,None
""")

NUMBER_LITERALS = _words("""
0.5 2.0 -1.5 0.25 3.0 1.0 0.0 -0.0 1e-3 2 3 -1 0 1 True False -2 1.25 float("inf")
""")

AUTOCAST = "torch.autocast('cpu', dtype=torch.bfloat16)"
CHECKPOINT = "torch.utils.checkpoint.checkpoint(FN, XX, use_reentrant=False)"
CLOSED = """type("K", (torch.autograd.Function,), {"generate_vmap_rule": True, "forward": staticmethod(lambda u: u * YY.sum()),
"setup_context": staticmethod(lambda ctx, i, o: ctx.save_for_backward(*i)),
"backward": staticmethod(lambda ctx, g: g * YY.sum() + ctx.saved_tensors[0])}).apply""".replace("\n", " ")
NESTED = {
    "value": [
        "T.jit(lambda u: (u.mul_(2), FN(u))[1])(XX.clone())",
        "(lambda q: (T.jit(lambda u: (u.mul_(2), FN(u))[1])(q), q)[1])(XX.clone())",
        "(lambda q: (T.jit(lambda u: (u[1:], FN(u)))(q)[0].add_(1), q)[1])(XX.clone())",
        "(lambda q: (T.jit(lambda u: u.detach_())(q), FN(q))[1])(XX.clone())",
        "(g := T.jit(FN), T.jit(lambda u: g(u) * 2 + g(u * 2)))[1](XX)",
        f"{CLOSED}(FN(XX))",
        f"T.grad(lambda u: {CLOSED}(FN(u)).sum())(XX)",
        f"T.jit(lambda u: {CLOSED}(FN(u)))(XX)",
        "T.grad(lambda u: T.jvp(FN, (u,), (u.sin(),))[1].sum())(XX)",
        "T.jvp(lambda u: T.vjp(FN, u)[1](torch.ones_like(FN(u)))[0], (XX,), (XX.cos(),))[1]",
        "T.vmap(lambda k: FN(XX) * k)(torch.arange(2))",
        "T.vmap(lambda k: FN(XX).float() * k)(torch.linspace(0, 1, 3, dtype=torch.float64))",
        "T.vmap(lambda v: T.vjp(FN, XX)[1](v)[0])(torch.stack([FN(XX), FN(XX) * 2]))",
        "T.vmap(lambda v: T.jvp(FN, (XX,), (v,))[1])(torch.stack([XX, XX * 2]))",
        "(w := XX.clone(), r := FN(w), w.detach_(), w.mul_(2), r)[-1]",
        "(w := XX.clone(), r := w[:1], q := FN(w), r.mul_(2), q + r.sum())[-1]",
    ],
    "scalar": [
        f"T.grad(lambda u: {CHECKPOINT.replace('XX', 'u')})(XX)",
        "torch.utils.checkpoint.checkpoint(lambda u: T.while_loop(lambda k, e: k < 2, lambda k, e: (k + 1, e * 0.5 + FN(e)), "
        "(torch.tensor(0), u))[1], XX, use_reentrant=False)",
        "T.jvp(T.grad(FN), (XX,), (XX.cos(),))[1]",
        "T.grad(lambda u: T.grad(FN)(u).square().sum())(XX)",
        "T.grad(lambda u: T.cond(u.sum() > 0, FN, lambda e: FN(e) * 2, (u,)))(XX)",
        "T.grad(T.jit(FN))(XX)",
        "T.grad(lambda u: T.while_loop(lambda k, e: k < 3, lambda k, e: (k + 1, e * 0.5 + FN(e)), (torch.tensor(0), u), "
        "max_steps=4)[1].sum())(XX)",
    ],
    "row": [
        f"T.scan(lambda c, r: (c, {CHECKPOINT.replace('XX', 'r')}), XX[0], XX)[1]",
        "torch.utils.checkpoint.checkpoint(lambda u: T.scan(lambda c, r: (c + r, FN(r)), u[0], u)[1], XX, use_reentrant=False)",
        "T.vmap(lambda u: T.vmap(FN)(u), in_dims=-1)(torch.stack([XX, XX * 2], -1))",
        "T.vmap(lambda u, k: FN(u) * k, (0, 0))(XX, torch.arange(XX.shape[0]))",
        "T.vmap(lambda u, k: FN(u).float() * k + k)(XX, torch.arange(XX.shape[0]).double())",
        "T.vmap(lambda u, k: torch.where(k > 1, FN(u), k))(XX, torch.arange(XX.shape[0]))",
        "T.vmap(lambda u, k: torch.where(k > 1, FN(u).float(), k.double()))(XX, torch.arange(XX.shape[0]))",
        "T.vmap(lambda u, k: (FN(u) * 2).fill_(k))(XX, torch.arange(XX.shape[0]))",
        "T.vmap(lambda u, k: (FN(u) * 2).add_(k, alpha=2))(XX, torch.arange(XX.shape[0]))",
        "T.jvp(T.vmap(FN), (XX,), (XX.sin(),))[1]",
        "T.jvp(lambda u: T.scan(lambda c, r: (c * 0.5 + r, FN(r)), u[0], u)[1], (XX,), (XX.sin(),))[1]",
        "T.vmap(lambda u: T.scan(lambda c, r: (c + r, FN(r)), u[0], u)[1])(torch.stack([XX, XX * 2]))",
        "T.vmap(lambda u: T.cond(u.sum() > 0, FN, lambda e: FN(e) * 2, (u,)))(XX)",
        "T.vmap(lambda u: T.switch((u > 0).sum(), [FN, lambda e: FN(e) * 2, lambda e: FN(e) + 1], (u,)))(XX)",
        "T.vmap(lambda u: T.map(FN, u))(torch.stack([XX, XX.flip(0)]))",
        "T.vmap(T.jit(FN))(XX)",
        "T.vmap(T.jacrev(FN))(XX)",
        "T.vmap(T.jacfwd(FN), in_dims=0, out_dims=-1)(XX)",
        f"T.vmap(lambda u: {CLOSED}(FN(u)))(XX)",
        f"T.vmap(T.grad(lambda u: {CLOSED}(FN(u)).sum()))(XX)",
        "T.grad(lambda u: T.scan(lambda c, r: (c * r, FN(r)), u[0], u)[1].sum())(XX)",
        "T.vmap(lambda u: T.while_loop(lambda k, e: e.sum().abs() < 5, lambda k, e: (k + 1, e * 2 + FN(u).sum()), "
        "(torch.tensor(0), u), max_steps=9)[1])(XX)",
    ],
    "last": [
        "T.vmap(FN, in_dims=-1)(XX)",
        "T.vmap(FN, in_dims=-1, out_dims=-1)(XX)",
        "T.vmap(T.vmap(FN, in_dims=-1), in_dims=0)(torch.stack([XX, XX + 1]))",
        "T.vmap(T.jacrev(FN), -1)(XX)",
        "T.vmap(lambda u: T.grad(lambda e: FN(e).sum())(u), -1, out_dims=-1)(XX)",
        "T.grad(lambda u: T.vmap(FN, -1)(u).sum())(XX)",
    ],
    "coarse": [
        f"T.vmap({AUTOCAST}(FN))(XX.float())",
        f"T.vmap({AUTOCAST}(lambda u: FN(u) @ u.new_ones(u.shape[-1], 2)))(XX.float())",
        f"T.vmap(T.grad({AUTOCAST}(lambda u: (FN(u) * F.linear(u, torch.ones(2, u.shape[-1])).sum()).sum())))(XX.float())",
        f"{AUTOCAST}(T.vmap(lambda u: F.linear(FN(u), torch.eye(3)) * u))(XX.float())",
    ],
}
"""Calls of a function FN that are a transform of a transform, by what it is given of the tensor XX; YY is another."""


KEYWORDS = _words("""
F.linear(input={f},weight={f},bias=None) F.layer_norm({f},normalized_shape=[{f}.shape[-1]],weight={f},eps=1e-3)
F.pad(input={f}[None],pad=(1,1),mode="reflect") F.pad({f}[None],[1,2],mode="circular") F.pad({f},pad=[0,1],value={p})
F.softmax({f},dim={d},dtype=torch.float64) F.cross_entropy({f},{i},reduction="none",label_smoothing=0.1)
F.cross_entropy(input={f},target={f}.softmax(-1),reduction="sum") F.mse_loss(input={f},target={f},reduction="none")
F.interpolate({f}[None],size=4,mode="linear",align_corners=True) F.interpolate(input={f}[None],scale_factor=2.0,mode="nearest")
F.conv1d({f}[None],weight={f}[:,:,None],stride=2,padding="valid") F.conv1d({f}[None],{f}[:,:,None],padding=1,dilation=1)
F.conv_transpose1d({f}[None],{f}[:,:,None],stride=2,output_padding=1) F.unfold({f}[None,None],kernel_size=2)
F.avg_pool1d({f}[None],kernel_size=2,stride=1,ceil_mode=True) F.adaptive_avg_pool1d({f}[None],output_size=2)
F.max_pool1d({f}[None],kernel_size=2,return_indices=True)[1] F.nll_loss({f}.log_softmax(-1),{i},ignore_index=1)
F.scaled_dot_product_attention(query={f}[None],key={f}[None],value={f}[None],is_causal=True)
F.scaled_dot_product_attention({f}[None],{f}[None],{f}[None],attn_mask={f},scale=0.5)
F.embedding(input={i},weight={f},padding_idx=0) F.one_hot({i},num_classes=5) F.threshold({f},threshold=0.1,value={p})
F.normalize(input={f},p=1.0,dim={d},eps=1e-6) F.cosine_similarity(x1={f},x2={f},dim={d}) F.logsigmoid(input={f})
F.triplet_margin_loss({f},{f},{f},margin=0.5) F.margin_ranking_loss({f},{f},{f}.sign()) F.poisson_nll_loss({f},{f}.abs())
F.pixel_shuffle({f}.reshape(1,1,-1,1).expand(1,4,-1,1),upscale_factor=2) F.prelu({f},torch.tensor([0.2]).double())
torch.sum(input={f},dim={d},keepdim=True) torch.max(input={f},dim={d},keepdim=True).values torch.std({f},dim={d},correction=0)
torch.topk(input={f},k=2,dim={d},largest=False,sorted=True)[0] torch.sort(input={f},dim={d},stable=True).values
torch.clamp(input={f},min={f},max={f}+1) torch.nan_to_num(input={f},nan={p},posinf=1.0) {f}.cumsum(dim={d},dtype=torch.float64)
torch.searchsorted({f}.flatten().sort()[0],{f}) torch.bucketize({f},{f}.flatten().sort()[0],right=True) torch.histc({f},bins=4)
torch.roll(input={f},shifts=(1,1),dims=(0,-1)) torch.flip({f},dims=[0]) torch.addmm(input={f},mat1={f},mat2={f},alpha={p})
torch.einsum("bij,bjk->bik",{f}[None],{f}[None]) torch.einsum("ij,kj->ik",{f},{f}) torch.einsum("ij,ij->",{f},{f})
torch.einsum("i,j,k->ijk",{f},{f},{f}) torch.einsum("...ij->...ji",{f}) torch.einsum("bi,ij,bj->b",{f},{f},{f})
torch.einsum("ij->j",{z}) torch.einsum("ij,jk->ik",{z},{z}.conj()) torch.einsum("~i~j,~j~->~i~",{f},{f})
torch.quantile({f},torch.tensor([0.25,0.75]).double(),dim={d}) torch.gather(input={f},dim={d},index={i}) {f}.sum(dim=({d},))
torch.scatter({f},dim={d},index={i},src={f},reduce="add") torch.scatter_reduce({f},{d},{i},{f},reduce="mean",include_self=False)
torch.isclose({f},{f},rtol=0.1) torch.allclose({f},{f}) torch.equal({f}.detach()*0,{f}.detach()*0)
torch.cartesian_prod({f}.flatten(),{f}.flatten()) torch.combinations({f}.flatten(),r=2) torch.triu_indices(3,3)
torch.isin({i},torch.tensor([1])) torch.vander({f}.flatten(),N=3) torch.logspace(0,1,{f}.shape[0],dtype=torch.float64)
torch.unique_consecutive({i}) torch.segment_reduce({f}.flatten(),"sum",lengths=torch.tensor([{f}.numel()])) torch.gradient({f})[0]
torch.unflatten({f},0,(-1,1)) torch.nn.utils.parameters_to_vector([{f},{f}]) torch.nn.functional.one_hot({i}.flatten())
""")
"""Calls with keyword arguments, and einsum."""

BITS = _words("""
{i}//{i} {i}%{i} {i}&{i} {i}|{n} {i}^{i} ~{i} {i}<<1 {i}>>{n} 7&{i} 2**{i} 5//({i}+1) 7%({i}+1) divmod(7,{n}+2)[1]
torch.bitwise_left_shift({i},1) torch.bitwise_not({i}) torch.bitwise_xor({i},{i}) torch.gcd({i},{i}) torch.lcm({i},{i})
{i}.div({n},rounding_mode="trunc") {i}.div({i}+1,rounding_mode="floor") torch.floor_divide({i},2) {i}.true_divide(2)
{i}.fmod(2) {i}.abs() {i}.sign() {i}.to(torch.uint8)+250 {i}.to(torch.int8)*100 {i}.to(torch.int32)//2 -{i}//2 {i}.neg()%3
{i}.median() {i}.cumprod(0) {i}.flip(0).diff() {i}.float().std() {i}.bool()&{b} {b}<<1 {b}*{i} {i}.bitwise_or_({n})
{z}.log() {z}.sqrt() {z}.pow(2) {z}**0.5 {z}.T@{z} torch.linalg.norm({z}) {z}.abs().square() {z}.cumsum(0) {z}.real*{z}.imag
torch.fft.irfft({z}) torch.fft.fftshift({z}) torch.fft.fft2({z}) torch.polar({f}.abs(),{f})*{z} {z}.cosh() {z}.tanh()
{z}.reciprocal() {z}.roll(1) {z}.diagonal() {z}.flip(0) torch.outer({z},{z}) torch.dot({z},{z}) torch.vdot({z},{z})
torch.where({z}.real>0,{z},{z}.conj()) {z}.index_select(0,{i}) {z}.prod() {z}.norm(dim={d}) {z}.sum({d},keepdim=True)
torch.stack([{z},{z}.conj()]) torch.cat([{z},{z}]) {z}.masked_fill({z}.imag>0,{p}) {z}+{f} {f}*{z}.abs() {z}/{z} {z}-{z}.mean()
torch.linalg.solve({z}@{z}.mH+3*torch.eye({z}.shape[0]),{z}) {z}.view(torch.float64) {z}==({z}) {z}.real.cumsum(0) {z}*1j {p}/{z}
""")
"""Arithmetic of integers, and of complex numbers."""

VIEWS_OF_VIEWS = _words("""
{f}[0][1:].mul_({p}) {f}.view(-1)[1:][::2].add_({p}) {f}.t()[0].unsqueeze(0)[...,1:].mul_({p}) {f}[1:][:,0]={p}
{f}.split(1)[0].squeeze(0)[...].add_({g}) {f}[:,1:].t()[0].copy_({g}) {f}.unbind()[0][1:].zero_() {f}[None][0][1:]*={p}
{f}.transpose(0,-1)[1:].transpose(0,-1).add_({p}) {f}.view(-1).view({f}.shape)[0].fill_({p}) {f}[0].view(-1)[0]+={p}
{f}.diagonal()[1:].mul_({p}) {f}.T.diagonal().add_({f}) {f}.expand(1,*{f}.shape)[0][0].neg_() {f}.unflatten(0,(-1,1))[0][0]={p}
{f}[{f}>0]={f}[{f}>0]*2 {f}[...,{b}]={p} {f}[{b},...]*={p} {f}[~({f}>0)]-={p} {f}[({f}>0)&({f}<1)]={p} {f}[{i},0]={p}
{f}[:,[0,1]]={f}[:,[1,0]] {f}[[0,1]]={f}[[1,0]].clone() {f}[{f}.argmax()]={p} {f}[{f}.argsort()]={f} {f}[{f}.isnan()]=0
{f}.index_put_(({i},{i}),{f}) {f}.index_put_(({i},),torch.tensor({p},dtype=torch.float64)) {f}.index_put_([{f}>0],{f}.sum())
{f}[torch.arange({f}.shape[0]),0]={p} {f}[torch.arange({f}.shape[0]).flip(0)]={f} {f}[...,None][...,0].add_({p})
{i}>>=1
{i}//=2 {i}%=2 {i}^=1 {i}&=3 {i}.bitwise_not_() {b}^={b} {i}[{i}>0]=-1 {i}[{b}]+=1 {i}.index_add_(0,{i},{i})
{f}.detach()[0][1:].zero_() {f}[1:].detach().mul_({p}) {f}.real[0].add_(1) {f}.swapaxes(0,-1)[0][None].mul_({g})
torch.add({f},{g},out={f}[0][1:]) torch.mul({f},{p},out={f}.t()[1:]) torch.stack([{f},{f}],out={f}.unsqueeze(0)[0])
torch.where({f}>0,{f},{f},out={f}.t()) torch.clamp(input={f},min=0.0,out={f}.view(-1)) torch.sort({f},dim=0,out=({f},{i}))
torch.linalg.norm({f},out={f}) torch.bmm({f}[None],{f}[None],out={f}[None]) torch.cumprod({f},0,out={f})
torch.prod({f},0,out={f}[0])
""")

BLOCKS = [
    """try:
    NEW = {f} + {g}
finally:
    TWO = {f} * 2""",
    """try:
    NEW = {f} * {p}
    if NEW.shape[0] > 2:
        raise ValueError("large")
except ValueError as error:
    NEW = {f}.sin() * len(error.args)
else:
    NEW = NEW + {f}.mean()""",
    """try:
    NEW = {f}
    NEW = NEW @ torch.ones(7, 2)
except (RuntimeError, IndexError):
    NEW = {f} * 3""",
    """try:
    {f}.add_({p})
    {}["missing"]
except KeyError:
    NEW = {f} - {f}.mean()
finally:
    {f}.mul_({p})""",
    """import contextlib
with contextlib.suppress(ZeroDivisionError):
    NEW = {f} * 2
    1 // 0
    NEW = {f} * 3""",
    """def FN(u):
    for k in range(3):
        yield u * k
NEW = sum(FN({f}))""",
    """def FN(u):
    had = yield u * 2
    yield u + had
GEN = FN({f})
next(GEN)
NEW = GEN.send({p})""",
    """def FN(rows):
    try:
        for r in rows:
            yield r.sum() * 2
    finally:
        rows[0].mul_(2)
NEW = torch.stack(list(FN({f})))""",
    """def FN(u):
    count = 0
    def add(w):
        nonlocal count
        count += 1
        return w * count
    return add(u) + add(u.sin()) * count
NEW = FN({f})""",
    """def FN(u):
    total = u.sum() * 0
    def add(w):
        nonlocal total
        total = total + w.mean()
        total *= 2
    for r in u:
        add(r)
    return total
NEW = FN({f})""",
    "NEW = torch.stack([r * k for k, r in enumerate({f}) if k % 2 == 0])",
    "NEW = sum(r.sum() for r in {f}.unbind(-1) if r.dim() < 2)",
    "NEW = sum({k: r * 2 for k, r in enumerate({f}) if k}.values())",
    "NEW = torch.cat([r.reshape(-1) for q in {f} for r in q.reshape(-1) if r.dim() == 0])",
    "NEW = torch.stack([p * q for p, q in zip({f}, reversed({f}))])",
    "NEW = Slotted({f}, {p}).scaled",
    """OBJ = Slotted({f}, 2)
OBJ.x = OBJ.x * {g}
OBJ.scaled = {f}
NEW = OBJ.x + OBJ.scaled""",
    "NEW = dataclasses.replace(Point({f}, {f}), x={f}).norm",
    "NEW = sum(dataclasses.astuple(Point({f}.detach(), {f}.detach())))",
    """OBJ = Point({f}, {g})
OBJ.x += OBJ.y
NEW = OBJ.norm + OBJ.x""",
    "NEW = Two({f}, {g})._replace(b={f}).a",
    "NEW = Two({f}, b={f}).both() * 2",
    "NEW = max(Two({f}, {g}), key=lambda one: one.dim() if isinstance(one, torch.Tensor) else -1)",
    "NEW = functools.reduce(torch.add, [{f}, {f}, {g}])",
    "NEW = functools.partial(torch.add, alpha=2)({f}, {f})",
    "NEW = list(itertools.accumulate({f}, lambda p, q: p * 0.5 + q))[-1]",
    "NEW = (lambda *a, **k: a[-1] * k['s'])({f}, {f}, s={g})",
    "NEW = (y := {f}.sin()) * y",
    "NEW = operator.itemgetter(1)([{f}, {f} * 2])",
    "NEW = sorted({f}.unbind(), key=lambda r: -r.dim())[0]",
    "NEW = dict(zip('ab', ({f}, {g}))) | {'a': {f}} and {f} * 2",
    "NEW = collections.deque([{f}, {f} + 1], maxlen=1)[0]",
    """OBJ = collections.defaultdict(list)
OBJ["k"].append({f})
OBJ["k"] += [{f}.sin()]
NEW = torch.stack([one.sum() for one in OBJ["k"]])""",
    """match tuple({f}.shape):
    case (k,):
        NEW = {f} * k
    case (k, *_):
        NEW = {f}.sum(0) * k
    case _:
        NEW = {f} + 1""",
    """for k, r in enumerate({f}):
    if k == 1:
        continue
    NEW = r * k
    if k > 1:
        break
else:
    NEW = {f}.cos()""",
    """w = {f}.detach().clone().requires_grad_()
NEW, = torch.autograd.grad((w * w).sin().sum(), w, create_graph=True)
NEW = torch.autograd.grad(NEW.sum(), w)[0]""",
    """w = {f}.detach().clone().requires_grad_()
w.register_hook(lambda g: g * 3)
((w * {f}.detach()).exp()).sum().backward()
NEW = w.grad""",
    """w = nn.Parameter({f}.detach().clone())
o = torch.optim.OPTIM
for _ in range(2):
    o.zero_grad()
    ((w - 1) ** 2).sum().backward()
    o.step()
NEW = w.detach()""",
    """with torch.no_grad():
    NEW = {f}.clone()
    NEW.mul_({p})
NEW = NEW * {f}""",
    "NEW = T.vmap(lambda d, k: d['a'] * k + d['b'].sum(), in_dims=({'a': 0, 'b': None}, None))({'a': {f}, 'b': {f}}, {f}.sum())",
    "NEW = T.vmap(lambda p: p[0] + p[1].sum(), in_dims=((0, -1),))(({f}, {f}))",
    "NEW = T.vmap(lambda u: (u * 2, u.sum()), out_dims=(-1, 0))({f})[0]",
    "NEW = T.vmap(lambda u: {'r': u.sin(), 's': [u * {f}.sum()]}, in_dims=-1, out_dims={'r': 0, 's': [-1]})({f})['s'][0]",
    "NEW = T.vmap(lambda u, k: torch.where(u > 0, u, k), in_dims=(0, None))({f}, {p})",
    "NEW = T.vmap(T.vmap(lambda u, k: u * k, (0, None)), (None, 0))({f}, {f})",
    "NEW = T.grad(lambda u: T.fori_loop(0, 3, lambda k, e: e * k + u.sin(), u).sum())({f})",
    "NEW = T.jvp(lambda u: T.while_loop(lambda k, e: k < 3, lambda k, e: (k + 1, e * 0.5 + u), (torch.tensor(0), u))[1], "
    "({f},), ({f},))[1]",
    "NEW = T.vmap(lambda u: T.fori_loop(0, 2, lambda k, e: e + u * k, u))({f})",
    "NEW = T.vmap(T.grad(lambda u: T.cond(u.sum() > 0, lambda e: (e * e).sum(), lambda e: e.sin().sum(), (u,))))({f})",
    "NEW = T.grad(lambda u: T.vmap(lambda r: T.scan(lambda c, e: (c * 0.5 + e, c.sin()), r[0], r)[1].sum())(u).sum())({f})",
    "NEW = T.jacfwd(lambda u: T.scan(lambda c, e: (c * 0.5 + e, c * e), u[0], u)[0])({f}[:2])",
    "NEW = T.jvp(lambda u: T.associative_scan(lambda p, q: p * q, u), ({f},), ({f},))[1]",
    "NEW = T.vmap(lambda u: T.associative_scan(torch.maximum, u, reverse=True))({f})",
    "NEW = T.scan(lambda c, e: (Two(c.a + e.sum(), c.b * 0.5), Two(c.a * e, e)), Two({f}.sum(), {f}.mean()), {f})[1].a",
    "NEW = T.cond({f}.sum() > 0, lambda e: Two(e['a'] * 2, e['b']), lambda e: Two(e['b'], e['a']), ({'a': {f}, 'b': {f}},)).b",
    """keep = []
def FN(u):
    keep.append(u.shape[0] if u.dim() else 0)
    return (u * len(keep)).sum()
NEW = T.grad(FN)({f})""",
    """def FN(u, *, s=2, **more):
    return (u ** s).sum() * more.get("k", 1)
NEW = T.grad(functools.partial(FN, k=3))({f})""",
]
"""Statements as people write them, of several lines: NEW is what they make, FN, OBJ, GEN and TWO are names of their own."""

OPTIMIZERS = (
    "SGD([w], lr=0.1, momentum=0.9)",
    "SGD([w], lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1)",
    "AdamW([w], lr=0.1)",
    "Adam([w], lr=0.1, amsgrad=True)",
    "RMSprop([w], lr=0.1, centered=True)",
    "Adagrad([w], lr=0.1)",
    "NAdam([{'params': [w], 'lr': 0.1}])",
    "Adam([w], lr=0.1, foreach=True)",
)

RECORDS = """
import collections, dataclasses, functools, itertools, operator
from typing import Any, NamedTuple
class Slotted:
    __slots__ = ("x", "_k")
    def __init__(self, x, k):
        self.x, self._k = x, k
    @property
    def scaled(self):
        return self.x * self._k
    @scaled.setter
    def scaled(self, value):
        self.x, self._k = value.sin(), 1
@dataclasses.dataclass
class Point:
    x: Any
    y: Any = 1.0
    @property
    def norm(self):
        return (self.x * self.x + self.y * self.y).sum().sqrt()
class Two(NamedTuple):
    a: Any
    b: Any = 0.5
    def both(self):
        return self.a + self.b
"""

FUNCTION_CLASSES = {
    "Twice": """
class Twice(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.sin()
    @staticmethod
    def backward(ctx, g):
        x, = ctx.saved_tensors
        return g * 2 * x.cos()
""",
    "Pair": """
class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, k):
        ctx.k = k
        ctx.shape = x.shape
        return x * k, x.sum()
    @staticmethod
    def backward(ctx, g, h):
        return g * ctx.k * 3 + h.expand(ctx.shape), None
""",
    "Split": """
class Split(torch.autograd.Function):
    generate_vmap_rule = True
    @staticmethod
    def forward(x, y):
        return x * y, (x > 0)
    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(*inputs)
        ctx.mark_non_differentiable(output[1])
    @staticmethod
    def backward(ctx, g, _):
        x, y = ctx.saved_tensors
        return (g * y if ctx.needs_input_grad[0] else None), (g * x if ctx.needs_input_grad[1] else None)
""",
    "Dirty": """
class Dirty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)
    @staticmethod
    def backward(ctx, g):
        return g * 2
""",
    "Row": """
class Row(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.shape = x.shape
        return x[0]
    @staticmethod
    def backward(ctx, g):
        return torch.cat([g[None] * 3, g.new_zeros(ctx.shape[0] - 1, *ctx.shape[1:])])
""",
    "Same": """
class Same(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x
    @staticmethod
    def backward(ctx, g):
        return g * 2
""",
    "Flat": """
class Flat(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.save_for_backward(x)
        return x.reshape(-1), x.detach() * 2
    @staticmethod
    def backward(ctx, g, h):
        return g.reshape(ctx.saved_tensors[0].shape) * ctx.saved_tensors[0] + h
""",
    "Lazy": """
class Lazy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(x, y)
        return x * 2, y * 3
    @staticmethod
    def backward(ctx, g, h):
        return (None if g is None else g * 2), (None if h is None else h * 3 + 1)
""",
}
FUNCTION_CALLS = _words("""
Twice.apply({f}) Pair.apply({f},{p})[0] Pair.apply({f},{p})[1] Split.apply({f},{f})[0] Dirty.apply({f})
Lazy.apply({f},{f})[0] Lazy.apply({f},{f})[1] Row.apply({f}) Same.apply({f}) Flat.apply({f})[0] Flat.apply({f})[1]
""")

MODULES = {
    "Norm": """
class Norm(nn.Module):
    def __init__(self):
        super().__init__()
        self.bn = nn.BatchNorm1d(3, dtype=torch.float64)
        self.register_buffer("count", torch.zeros((), dtype=torch.float64))
    def forward(self, x):
        self.count += 1
        return self.bn(x) * self.count
""",
    "Mean": """
class Mean(nn.Module):
    def __init__(self):
        super().__init__()
        self.register_buffer("running", torch.zeros(3, dtype=torch.float64))
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, 3, dtype=torch.float64))
        self.steps = 0
    def forward(self, x):
        with torch.no_grad():
            self.running.mul_(0.9).add_(x.reshape(-1, 3).mean(0), alpha=0.1)
        return x * self.scale + self.running
""",
    "Tied": """
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a = nn.Linear(3, 3, dtype=torch.float64)
        self.b = nn.Linear(3, 3, bias=False, dtype=torch.float64)
        self.b.weight = self.a.weight
        self.drop = nn.Dropout(0.3)
        self.register_buffer("last", torch.zeros(3, dtype=torch.float64))
    def forward(self, x):
        y = self.b(self.drop(self.a(x).tanh()))
        self.last = y.detach().reshape(-1, 3)[0].clone()
        return y
""",
    "Seq": """
class Seq(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Linear(3, 2), nn.LayerNorm(2), nn.GELU(), nn.Linear(2, 3))
        self.double()
""",
    "Gate": """
class Gate(nn.Module):
    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Identity()})
        self.register_buffer("avg", torch.zeros(3))
        self.seen = []
        self.double()
    @property
    def mean(self):
        return self.avg.mean()
    def forward(self, x, *, scale=2.0):
        y = self.parts["b"](self.parts["a"](x)) * scale
        if self.training:
            self.avg = self.avg * 0.9 + 0.1 * y.detach().reshape(-1, 3).mean(0)
        return y - self.mean
""",
    "Hooked": """
class Hooked(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.ModuleList([nn.Linear(3, 3).double() for _ in range(2)])
        self.net[0].register_forward_hook(lambda m, i, o: o * 2)
        self.net[1].register_forward_pre_hook(lambda m, i: (i[0].tanh(),))
        self.register_buffer("steps", torch.zeros((), dtype=torch.long))
    def forward(self, x):
        for one in self.net:
            x = x + one(x)
        self.steps.add_(1)
        return torch.where(self.steps > 1, x, x * 2)
""",
    "Trainer": """
class Trainer:
    def __init__(self):
        self.net = nn.Linear(3, 2).double()
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9)
        self.history, self.count, self.best = [], 0, torch.tensor(9.0)
    def parameters(self):
        return [*self.net.parameters()]
    def buffers(self):
        return [torch.tensor(self.count), self.best, *self.history]
    def __call__(self, x):
        x = x.detach()
        self.opt.zero_grad()
        loss = self.net(x).square().mean()
        loss.backward()
        self.opt.step()
        self.count += 1
        self.history.append(loss.detach())
        self.best = torch.minimum(self.best, loss.detach())
        return loss.detach() * x
""",
    "Keeper": """
class Keeper:
    def __init__(self):
        self.state = {"n": 0, "last": None}
        self.scale = torch.linspace(0.5, 1.5, 3, dtype=torch.float64, requires_grad=True)
        self.calls = [0]
    def parameters(self):
        return [self.scale]
    def buffers(self):
        last = self.state["last"]
        return [torch.tensor(self.state["n"]), torch.tensor(self.calls[0])] + ([] if last is None else [last])
    def __call__(self, x):
        self.state["n"] += x.shape[0]
        self.calls[0] += 1
        last, self.state["last"] = self.state["last"], x.detach().sum()
        return x * self.scale if last is None else x * self.scale + last
""",
}
